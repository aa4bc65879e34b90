"""Deferred initialisation: the values are those of the model's own code, and cost no memory before."""

import copy
import gc
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
import transformers
from hypothesis import given, settings
from torch import Tensor, nn

from shardwise.core.errors import ShardwiseError, UsageError
from shardwise.model.deferred import (
    deferred_init,
    deferred_seed,
    forget,
    is_deferred,
    materialize,
    recorded_ops,
    recorder,
)
from shardwise.model.deferred.history import Cell, Op
from shardwise.model.deferred.streams import mix

N = 160
assert N * N >= recorder.MIN_NUMEL


# --- The same distribution as without the context -------------------------------------------------


class Residual(nn.Module):
    """GPT-2's scheme: everything normal, residual projections scaled by depth."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(N, 2 * N), nn.Linear(2 * N, N)
        self.table = nn.Parameter(torch.randn(N, N) * 0.02)
        self.register_buffer("mask", torch.tril(torch.ones(N, N)).view(1, 1, N, N))
        self.register_buffer("angles", torch.outer(torch.arange(2 * N), torch.linspace(0, 1, N)))
        self.drop_path = [x.item() for x in torch.linspace(0, 0.1, 4)]
        self.apply(self._init_weights)
        for name, p in self.named_parameters():
            if name == "down.weight":
                nn.init.normal_(p, std=0.02 / 24**0.5)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(mean=0.0, std=0.02)
            module.bias.data.zero_()


class Experts(nn.Module):
    """One parameter for all experts, filled through views, and one replaced as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, N, N))
        for i in range(4):
            nn.init.normal_(self.weight[i], std=0.01 * (i + 1))
        self.router = nn.Linear(N, N)
        self.router.weight.data = torch.rand(N, N).t() + 3
        self.legacy = nn.Parameter(torch.Tensor(N, N))
        nn.init.xavier_uniform_(self.legacy)
        nn.init.trunc_normal_(self.legacy[: N // 2], std=0.5)


def init_function(
    name: str, *args: float, shape: tuple[int, ...] = (N, N)
) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        module = nn.Module()
        module.weight = nn.Parameter(torch.empty(shape))
        getattr(nn.init, name)(module.weight, *args)
        return module

    return build


PLAIN: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(N, 2 * N),
    "bfloat16": lambda: nn.Linear(N, N).to(torch.bfloat16),
    "embedding": lambda: nn.Embedding(300, N, padding_idx=3),
    "layernorm": lambda: nn.LayerNorm([N, N]),
    "conv": lambda: nn.Conv2d(64, 64, 3),
    "channels_last": lambda: nn.Conv2d(64, 64, 3).to(memory_format=torch.channels_last),
    "batchnorm": lambda: nn.BatchNorm1d(20000),
    "lstm": lambda: nn.LSTM(N, N, num_layers=2),
    "attention": lambda: nn.MultiheadAttention(N, 4),
    "weight_norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(N, N)),
    "residual": Residual,
    "experts": Experts,
    "trunc_normal": init_function("trunc_normal_", 0.0, 1.0, -0.5, 0.5),
    "orthogonal": init_function("orthogonal_", 2.0),
    "sparse": init_function("sparse_", 0.3),
    "dirac": init_function("dirac_", shape=(N, N, 3)),
    "eye": init_function("eye_"),
}

SMALL = {"hidden_size": 192, "num_hidden_layers": 1, "num_attention_heads": 4}
TEXT = SMALL | {"intermediate_size": 256, "vocab_size": 500}
HUGGINGFACE: dict[str, tuple[str, dict[str, object]]] = {
    "GPT2LMHeadModel": ("GPT2", {"n_embd": 192, "n_layer": 2, "n_head": 4, "vocab_size": 500}),
    "LlamaForCausalLM": ("Llama", TEXT | {"pad_token_id": 0}),
    "T5ForConditionalGeneration": (
        "T5",
        {"d_model": 192, "d_ff": 256, "num_layers": 1, "num_heads": 4, "vocab_size": 500},
    ),
    "BertForMaskedLM": ("Bert", TEXT),
    "ViTForImageClassification": ("ViT", SMALL | {"image_size": 96, "patch_size": 8}),
    "MixtralForCausalLM": ("Mixtral", TEXT | {"num_local_experts": 2, "num_key_value_heads": 2}),
    "MambaForCausalLM": (
        "Mamba",
        {"hidden_size": 192, "num_hidden_layers": 1, "vocab_size": 500, "state_size": 64},
    ),
    "Wav2Vec2ForCTC": (
        "Wav2Vec2",
        TEXT
        | {
            "conv_dim": (96, 96),
            "conv_stride": (5, 2),
            "conv_kernel": (10, 3),
            "num_conv_pos_embeddings": 16,
            "num_conv_pos_embedding_groups": 4,
        },
    ),
}


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def assert_same_initialisation(build: Callable[[], nn.Module]) -> None:
    torch.manual_seed(1)
    eager, other = tensors_of(build()), tensors_of(build())
    with deferred_init():
        built = tensors_of(build())
    assert built.keys() == eager.keys()
    assert any(is_deferred(t) for t in built.values())
    for name, tensor in built.items():
        assert is_deferred(tensor) == (tensor.device.type == "meta"), name
        assert is_deferred(tensor) or tensor.numel() < recorder.MIN_NUMEL, name
        values = materialize(tensor) if is_deferred(tensor) else tensor.detach()
        assert not values.requires_grad, name
        assert values.is_contiguous(), name
        assert (values.shape, values.dtype) == (eager[name].shape, eager[name].dtype), name
        if torch.equal(eager[name], other[name]):  # no random numbers in it
            assert torch.equal(values, eager[name]), name
        else:
            assert_same_distribution(values, eager[name].detach(), name)


def assert_same_distribution(a: Tensor, b: Tensor, name: str) -> None:
    a, b = a.double().flatten().sort().values, b.double().flatten().sort().values
    bound = 6 / a.numel() ** 0.5
    assert abs(a.mean() - b.mean()) < bound * b.std() + 1e-12, name
    assert abs(a.std() / b.std() - 1) < bound, name
    # Kolmogorov-Smirnov: chance below 1e-7 of failing for equal distributions.
    cdf = [torch.searchsorted(x, b, right=True) / x.numel() for x in (a, b)]
    assert (cdf[0] - cdf[1]).abs().max() < 3 * (2 / a.numel()) ** 0.5, name


@pytest.mark.parametrize("build", PLAIN.values(), ids=PLAIN)
def test_plain_modules_get_their_own_initialisation(build: Callable[[], nn.Module]) -> None:
    assert_same_initialisation(build)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", HUGGINGFACE)
def test_transformers_get_their_own_initialisation(name: str) -> None:
    prefix, options = HUGGINGFACE[name]
    config = getattr(transformers, f"{prefix}Config")(**options)
    assert_same_initialisation(lambda: getattr(transformers, name)(copy.deepcopy(config)))


@pytest.mark.filterwarnings("ignore")
def test_auto_model_in_bfloat16_ties_and_types() -> None:
    config = transformers.GPT2Config(n_embd=192, n_layer=1, n_head=4, vocab_size=500)
    with deferred_init():
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    assert model.lm_head.weight is model.transformer.wte.weight
    assert materialize(model.lm_head.weight).dtype == torch.bfloat16
    assert materialize(model.lm_head.weight).float().std() == pytest.approx(0.02, rel=0.05)


def test_rows_written_through_views_and_lists() -> None:
    with deferred_init():
        table = nn.Embedding(300, N, padding_idx=3)
        with torch.no_grad():
            table.weight[5] = 7
            table.weight[[8, 9]] = 2.0
            table.weight.T[4].fill_(5)
            table.weight[torch.tensor([10]), 1] = torch.tensor(6.0)
    values = materialize(table.weight)
    assert values[3, :4].abs().max() == 0
    assert values[5, :4].tolist() == [7] * 4
    assert values[8:10, :4].tolist() == [[2] * 4] * 2
    assert (values[:, 4] == 5).all()
    assert values[10, 1] == 6


# --- Any program: the same values as eager ---------------------------------------------------------

STEPS: list[Callable[[list[Tensor], int], None]] = [
    lambda pool, k: pool.append(torch.arange(12.0).reshape(3, 4) + k),
    lambda pool, k: pool.append(torch.full((3, 4), float(k))),
    lambda pool, k: pool.append(torch.ones(k % 3 + 1, 4)),
    lambda pool, k: pool.append(pool[k % len(pool)].clone()),
    lambda pool, k: pool.append(pool[k % len(pool)] * 2 - 1),
    lambda pool, k: pool.append(torch.zeros_like(pool[k % len(pool)])),
    lambda pool, k: pool.append(torch.cat([pool[k % len(pool)], pool[-1]])[:3]),
    lambda pool, k: pool.append(nn.Parameter(pool[k % len(pool)].detach()).data),
    lambda pool, k: pool.append(copy.deepcopy(pool[k % len(pool)])),
    lambda pool, k: pool.append(pool[k % len(pool)].double().float()),
    lambda pool, k: pool.append(pool[k % len(pool)][-1:].expand(3, 4)),
    lambda pool, k: pool[k % len(pool)].clone().t().mul_(k).sub_(1),
    lambda pool, k: pool[0].fill_(k),
    lambda pool, k: pool[0][k % 3].zero_(),
    lambda pool, k: pool[0][:, k % 4].add_(pool[-1].sum()),
    lambda pool, k: pool[0].t()[1:3].mul_(2),
    lambda pool, k: pool[0].copy_(pool[k % len(pool)][:1].clone()),
    lambda pool, k: pool[0].copy_(pool[0].flip(0)),
    lambda pool, k: pool[0].add_(pool[k % len(pool)].max().item()),
    lambda pool, k: pool[0].__setitem__(pool[0] > k, -1.0),
    lambda pool, k: torch.add(pool[0], k, out=pool[0]),
    lambda pool, k: torch._foreach_add_([pool[0], torch.ones(2)], 1.0),
    lambda pool, k: setattr(pool[0], "data", (pool[-1] + k)[:1].repeat(3, 1)),
    lambda pool, k: pool.insert(0, pool[0].view(3, 4)),
]


@given(
    st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 7)), min_size=3, max_size=14),
    st.sampled_from([1, 6, 12]),
    st.randoms(use_true_random=False),
)
@settings(max_examples=150)
def test_any_program_gives_the_values_of_eager(steps, threshold, random) -> None:
    def run() -> list[Tensor]:
        pool = [torch.zeros(3, 4)]
        for step, k in steps:
            step(pool, k)
        return pool

    expected = run()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recorder, "MIN_NUMEL", threshold)
        with deferred_init():
            pool = run()
    for i in random.sample(range(len(pool)), len(pool)):
        values = materialize(pool[i]) if is_deferred(pool[i]) else pool[i]
        assert torch.equal(values, expected[i])


# --- Seeds -----------------------------------------------------------------------------------------


@pytest.fixture
def blocks() -> nn.Module:
    torch.manual_seed(7)
    with deferred_init():
        return nn.Sequential(*(nn.Linear(N, N) for _ in range(4)), Residual())


def values_of(module: nn.Module, **options: int) -> dict[str, Tensor]:
    return {k: materialize(t, **options) for k, t in tensors_of(module).items() if is_deferred(t)}


def test_values_do_not_depend_on_order_or_subset(blocks: nn.Module) -> None:
    forward = values_of(blocks)
    backward = {name: materialize(tensors_of(blocks)[name]) for name in reversed(forward)}
    assert all(torch.equal(forward[name], backward[name]) for name in forward)
    assert len({tuple(values.flatten()[:8].tolist()) for values in forward.values()}) > 5


def test_same_seed_same_values_and_other_seed_other_values(blocks: nn.Module) -> None:
    first, again = blocks[0].weight, values_of(blocks, seed=deferred_seed(blocks[0].weight))
    assert all(torch.equal(values, again[name]) for name, values in values_of(blocks).items())
    assert not torch.equal(materialize(first, seed=1), materialize(first))
    assert torch.equal(materialize(first, seed=1), materialize(first, seed=1))
    assert not torch.equal(materialize(first), materialize(blocks[1].weight))


def test_the_seed_follows_torch_and_moves_on() -> None:
    def build(seed: int | None) -> Tensor:
        if seed is not None:
            torch.manual_seed(seed)
        with deferred_init():
            return torch.rand(N, N)

    first = build(5)
    assert not torch.equal(materialize(first), materialize(build(None)))  # as eager models differ
    assert torch.equal(materialize(first), materialize(build(5)))
    assert not torch.equal(materialize(first), materialize(build(6)))


def test_materialize_leaves_the_generator_alone(blocks: nn.Module) -> None:
    before = torch.get_rng_state()
    values_of(blocks)
    assert torch.equal(torch.get_rng_state(), before)


def test_an_explicit_generator_decides() -> None:
    with deferred_init():
        generator = torch.Generator().manual_seed(3)
        a = torch.randn(N, N, generator=generator)
        b = torch.empty(N, N).normal_(generator=generator)
    assert torch.equal(materialize(a), materialize(a, seed=11))
    assert not torch.equal(materialize(a), materialize(b))


def test_no_two_operations_share_a_stream() -> None:
    seeds = {mix(1234, index) % 2**32 for index in range(200_000)}
    assert len(seeds) == 200_000


# --- What is replayed ------------------------------------------------------------------------------


def test_dead_stores_are_skipped() -> None:
    with deferred_init():
        layer = nn.Linear(N, N)
        nn.init.zeros_(layer.weight)
        nn.init.normal_(layer.weight)
        with torch.no_grad():
            layer.weight.mul_(0.5)
        half = nn.Parameter(torch.zeros(N, N))
        with torch.no_grad():
            half[: N // 2].fill_(1)
    assert recorded_ops(layer.weight) == ["aten.normal_", "aten.mul_"]
    assert recorded_ops(half) == ["aten.zeros", "aten.fill_"]
    assert materialize(half).mean() == 0.5


def test_only_what_the_values_depend_on_is_replayed() -> None:
    with deferred_init():
        source = torch.randn(N, N)
        like, shift = torch.randn_like(source), source + 1
        source.zero_()
    assert recorded_ops(like) == ["aten.randn_like"]
    assert recorded_ops(shift) == ["aten.randn", "aten.add"]
    assert materialize(shift).mean() == pytest.approx(1, abs=0.05)
    assert recorded_ops(source) == ["aten.zero_"]


def test_memory_that_nobody_wrote_is_zero() -> None:
    with deferred_init():
        blank = torch.empty(N, N)
    assert recorded_ops(blank) == []
    assert materialize(blank).abs().max() == 0


def test_copies_have_the_values_of_their_source_and_their_own_later_writes() -> None:
    with deferred_init():
        encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(N, 4, batch_first=True), 2)
        first, second = (layer.linear1.weight for layer in encoder.layers)
        with torch.no_grad():
            second[0].zero_()
    assert torch.equal(materialize(first)[1:], materialize(second)[1:])
    assert materialize(first)[0].abs().min() > 0
    assert materialize(second)[0].abs().max() == 0


def test_real_values_copied_in() -> None:
    loaded = torch.arange(float(N * N)).view(N, N)
    expected = loaded.clone()
    with deferred_init():
        copied, assigned, state = (nn.Linear(N, N) for _ in range(3))
        copied.weight.data.copy_(loaded)
        state.load_state_dict({"weight": loaded, "bias": torch.zeros(N)})
        loaded.add_(1)  # too late for the copies
        assigned.weight.data = loaded
        assigned.weight.data.mul_(2)
        assigned.bias.data = copied.weight.data[2]
    assert torch.equal(materialize(copied.weight), expected)
    assert torch.equal(materialize(state.weight), expected)
    assert torch.equal(materialize(assigned.weight), (expected + 1) * 2)
    assert torch.equal(loaded, expected + 1)
    assert torch.equal(assigned.bias, expected[2])


def test_code_that_reads_values_gets_them() -> None:
    with deferred_init():
        ones, noise = torch.ones(N, N), torch.rand(N, N)
        assert ones.sum().item() == N * N
        assert float(ones.mean()) == 1
        assert ones[0, :2].tolist() == [1, 1]
        assert ones[0].numpy().sum() == N
        assert bool((noise < 1).all())
        assert torch.equal(noise, noise.clone())
        num_positive = len(torch.nonzero(noise > 0.5))
        bias = torch.zeros(4)
        bias.copy_(noise[0, :4])
    assert num_positive == (materialize(noise) > 0.5).sum()
    assert torch.equal(bias, materialize(noise)[0, :4])


def test_deferred_tensors_look_real_inside_the_context() -> None:
    with deferred_init():
        weight = nn.Linear(N, N, device="meta").weight
        assert weight.device == torch.device("cpu")
        assert not weight.is_meta
        assert torch.arange(3, device=weight.device).tolist() == [0, 1, 2]
        assert weight.new_tensor([1.0, 2.0]).tolist() == [1, 2]
    assert weight.is_meta
    assert materialize(weight).std() > 0


def test_kernels_that_choose_other_strides_than_meta_kernels() -> None:
    with deferred_init():
        noise = torch.randn(N, N)
        u, s, v = torch.linalg.svd(noise)
        weight = nn.Parameter(u @ torch.diag(s) @ v)
    assert torch.allclose(materialize(weight), materialize(noise), atol=1e-4)


def test_writes_into_real_and_deferred_tensors_at_once() -> None:
    with deferred_init():
        large, small = torch.ones(N, N), torch.ones(3)
        torch._foreach_mul_([large, small], 2.0)
    assert small.tolist() == [2, 2, 2]
    assert materialize(large).unique().tolist() == [2]


def test_values_do_not_depend_on_the_default_dtype_at_replay() -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        with deferred_init():
            table = torch.rand(N, N)
        inside = materialize(table)
    finally:
        torch.set_default_dtype(torch.float32)
    assert inside.dtype == torch.bfloat16
    assert torch.equal(materialize(table), inside)


def test_complex_views() -> None:
    with deferred_init():
        number = torch.complex(torch.rand(N, N), torch.rand(N, N))
        conjugate, imaginary = number.conj() * 2, number.conj().imag.clone()
    assert torch.equal(materialize(conjugate), materialize(number).conj() * 2)
    assert torch.equal(materialize(imaginary), -materialize(number).imag)


def test_a_window_on_a_larger_storage_comes_alone() -> None:
    with deferred_init():
        fused = torch.randn(3 * N, N)
        key = nn.Parameter(fused.chunk(3)[1])
        fused[N].fill_(7)
    values = materialize(key)
    assert values.untyped_storage().nbytes() == values.nbytes
    assert torch.equal(values, materialize(fused)[N : 2 * N])
    assert values[0].tolist() == [7] * N


def test_casts_after_the_context() -> None:
    with deferred_init():
        layer = nn.Linear(N, N)
    before = materialize(layer.weight)
    layer.to(torch.bfloat16)
    assert is_deferred(layer.weight)
    assert torch.equal(materialize(layer.weight), before.bfloat16())
    forget(layer.weight)
    assert not is_deferred(layer.weight)


def test_a_second_context_goes_on() -> None:
    with deferred_init():
        layer = nn.Linear(N, N)
    with deferred_init(), deferred_init():
        nn.init.ones_(layer.weight)
    assert materialize(layer.weight).min() == 1
    assert torch.empty(N, N).device.type == "cpu"


# --- Errors ----------------------------------------------------------------------------------------


def test_a_meta_tensor_without_a_record_is_an_error() -> None:
    stranger = torch.empty(N, N, device="meta")
    assert not is_deferred(stranger)
    with pytest.raises(ShardwiseError, match=r"no recorded initialisation: .* inside"):
        materialize(stranger)
    with deferred_init():
        weight, cured = torch.zeros(N, N), torch.zeros(N, N)
        weight.copy_(stranger)
        cured.copy_(stranger).fill_(1)
    with pytest.raises(UsageError, match=r"copy_.* on a meta tensor without values"):
        materialize(weight)
    assert materialize(cured).min() == 1


def test_a_real_tensor_is_an_error() -> None:
    with pytest.raises(UsageError, match="already has its values"):
        materialize(torch.zeros(3))


def test_writes_after_the_context_are_an_error() -> None:
    with deferred_init():
        layer = nn.Linear(N, N)
    nn.init.ones_(layer.weight)
    with pytest.raises(UsageError, match="written to after"):
        materialize(layer.weight)


# --- Memory ----------------------------------------------------------------------------------------


def test_histories_die_with_their_tensors() -> None:
    def num_alive() -> int:
        return sum(type(thing) in (Op, Cell) for thing in gc.get_objects())

    gc.collect()
    gc.disable()  # reference counts alone must do it
    try:
        before = num_alive()
        with deferred_init():
            weight = torch.zeros(N, N)
            for _ in range(100):
                weight = (weight + 1).fill_(0)  # each one needs nothing of the one before
            alive = num_alive() - before
        assert 0 < alive < 8
        del weight
        assert num_alive() == before
    finally:
        gc.enable()


SCRIPT = """
import resource, torch
from torch import nn
from shardwise.model.deferred import deferred_init, materialize

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

torch.empty(1 << 20).normal_()
start = peak()
with deferred_init():
    model = nn.Sequential(
        nn.Embedding(50_000, 4096, padding_idx=0),
        *(nn.TransformerEncoderLayer(4096, 32, 16384, batch_first=True) for _ in range(9)),
    )
    for p in model.parameters():
        if p.dim() > 1:
            nn.init.trunc_normal_(p, std=0.02)
num_parameters = sum(p.numel() for p in model.parameters())
built = peak()
weight = materialize(model[5].self_attn.out_proj.weight)
one = peak()
with deferred_init():
    chain = torch.ones(weight.shape)
    for _ in range(12):
        chain = chain + 1
materialize(chain)
print(num_parameters, built - start, one - built, peak() - one, weight.nbytes / 2**20)
"""


def test_two_billion_parameters_cost_nothing_and_one_tensor_costs_itself() -> None:
    root = Path(recorder.__file__).parents[3]
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    num_parameters, building, one, chain, size = map(float, run.stdout.split())
    assert num_parameters > 2e9
    assert building < 100
    # The tensor, and what one round of `trunc_normal_` itself needs (masks, a second sample).
    assert one < 4 * size
    # Of a chain of twelve temporaries two live at a time.
    assert chain < 2 * size
