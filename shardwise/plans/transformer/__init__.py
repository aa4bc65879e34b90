"""Transformers by formulas: units, operations and saved bytes without a module, whatever the size.

[Note: Calls by formulas]
A model is written down as the calls of its modules in one forward: the parameters that each has
itself, what it is given, what autograd saves of it, and the operations of its matrix products.
Everything else follows by the rules that hold for real modules: ``model/inspect.py`` finds units,
``model/tiling.py`` cuts tiles, ``model/activations.py`` counts saved storages. Tests compare all of
it with the modules that the two families describe: ``model/gpt.py``, and Llama of transformers.
"""
