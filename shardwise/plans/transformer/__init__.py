"""Transformers as formulas: units, operations and saved bytes of any size, without a module.

[Note: Calls by formulas]
A model is described by the calls of its modules in one forward: each module's own parameters, its
inputs, what autograd saves, and the operations of its matrix products. Everything else follows from
the rules for real modules: ``model/inspect.py`` finds units, ``model/tiling.py`` cuts tiles,
``model/activations.py`` counts saved storages. Tests compare all of it with the modules of the two
families: ``model/gpt.py``, and Llama of transformers.
"""
