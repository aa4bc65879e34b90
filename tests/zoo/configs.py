"""Unmodified transformers architectures, tiny: built from a configuration, nothing downloaded.

Every random choice (dropout, layerdrop, masking, drop path) is off, and every loss is a mean over
samples with equally many labels, so that the mean of the ranks' losses is the global batch's.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import (
    AlbertConfig,
    AlbertForMaskedLM,
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForMaskedLM,
    BloomConfig,
    BloomForCausalLM,
    CLIPConfig,
    CLIPModel,
    ConvNextConfig,
    ConvNextForImageClassification,
    DebertaV2Config,
    DebertaV2ForMaskedLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    SegformerConfig,
    SegformerForImageClassification,
    SwinConfig,
    SwinForImageClassification,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
    Wav2Vec2Config,
    Wav2Vec2ForCTC,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

VOCAB, LENGTH, HIDDEN, LAYERS = 96, 8, 32, 3
BATCH = 4

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """One architecture: how to build and feed it, and which units it should fall into."""

    kind: str
    build: Callable[..., nn.Module]
    inputs: Callable[[torch.Generator], Batch]
    units: tuple[str, ...]
    """Module names of the units beside the root, without their index: ``h*3`` is h.0 to h.2."""
    min_unit_numel: int = 4000
    dtype: torch.dtype = torch.float64
    exact: bool = True
    """Whether float64 stays float64 inside; norms that compute in float32 whatever comes do not."""
    loss: Callable[[Any, Batch], torch.Tensor] | None = None
    """Its own loss, unless that is computed in float32 or is not additive over samples."""

    @property
    def tolerances(self) -> tuple[float, float]:
        """Of losses and of parameters after a few steps of AdamW."""
        if self.dtype is not torch.float64:
            return 1e-5, 1e-3
        return (1e-9, 1e-8) if self.exact else (1e-5, 1e-5)


def make(case: Case, seed: int = 0, **options: int) -> nn.Module:
    torch.manual_seed(seed)
    return case.build(**options).to(case.dtype).train()


def loss_of(case: Case, model: nn.Module, batch: Batch) -> torch.Tensor:
    if case.loss is None:
        return model(**batch).loss
    return case.loss(model(**{n: t for n, t in batch.items() if n != "labels"}), batch)


def batch(case: Case, step: int) -> Batch:
    """The global batch of one step."""
    made = case.inputs(torch.Generator().manual_seed(1000 + step))
    return {n: t.to(case.dtype) if t.is_floating_point() else t for n, t in made.items()}


def expand(units: tuple[str, ...]) -> list[str]:
    """The names that ``Case.units`` stands for."""
    names = []
    for unit in units:
        name, _, count = unit.partition("*")
        names += [f"{name}.{i}" for i in range(int(count))] if count else [name]
    return names


# --- inputs ---------------------------------------------------------------------------------------


def _tokens(g: torch.Generator, length: int = LENGTH, low: int = 3) -> torch.Tensor:
    return torch.randint(low, VOCAB, (BATCH, length), generator=g)


def _causal(g: torch.Generator) -> Batch:
    tokens = _tokens(g)
    return {"input_ids": tokens, "labels": tokens}


def _masked(g: torch.Generator) -> Batch:
    return {"input_ids": _tokens(g), "labels": _tokens(g)}


def _pair(g: torch.Generator) -> Batch:
    return {"input_ids": _tokens(g), "labels": _tokens(g, 6)}


def _image(g: torch.Generator, size: int = 32) -> torch.Tensor:
    return torch.randn(BATCH, 3, size, size, generator=g)


def _classified(g: torch.Generator) -> Batch:
    return {"pixel_values": _image(g), "labels": torch.randint(5, (BATCH,), generator=g)}


def _spoken(g: torch.Generator) -> Batch:
    return {"input_values": torch.randn(BATCH, 400, generator=g), "labels": _tokens(g, 4)}


def _transcribed(g: torch.Generator) -> Batch:
    features = torch.randn(BATCH, 16, 24, generator=g)
    return {"input_features": features, "labels": _tokens(g, 6)}


def _captioned(g: torch.Generator) -> Batch:
    return {"input_ids": _tokens(g), "pixel_values": _image(g)}


# --- losses ---------------------------------------------------------------------------------------


def _next_token(output: Any, batch: Batch) -> torch.Tensor:
    """As the models' own, which cast logits to float32 first."""
    return F.cross_entropy(output.logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


def _mean_match(output: Any, batch: Batch) -> torch.Tensor:
    """CLIP's own loss compares all pairs of a batch; how well each pair matches is additive."""
    return -output.logits_per_image.diagonal().mean()


# --- architectures --------------------------------------------------------------------------------

_DECODER = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 64, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "attention_dropout": 0.0,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_ENCODER = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 64, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "max_position_embeddings": 64, "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0, "pad_token_id": 0,
}  # fmt: skip
_VISION = {"num_channels": 3, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def _gpt2(layers: int = LAYERS) -> nn.Module:
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCAB, n_positions=64, n_embd=HIDDEN, n_layer=layers, n_head=4,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=1, eos_token_id=2,
            pad_token_id=0,
        )
    )  # fmt: skip


def _llama() -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**_DECODER))


def _gpt_neox() -> nn.Module:
    options = {k: v for k, v in _DECODER.items() if k != "num_key_value_heads"}
    return GPTNeoXForCausalLM(GPTNeoXConfig(**options, hidden_dropout=0.0))


def _opt() -> nn.Module:
    return OPTForCausalLM(
        OPTConfig(
            vocab_size=VOCAB, hidden_size=HIDDEN, word_embed_proj_dim=HIDDEN, ffn_dim=64,
            num_hidden_layers=LAYERS, num_attention_heads=4, max_position_embeddings=64,
            dropout=0.0, layerdrop=0.0, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        )
    )  # fmt: skip


def _bloom() -> nn.Module:
    return BloomForCausalLM(
        BloomConfig(
            vocab_size=VOCAB, hidden_size=HIDDEN, n_layer=LAYERS, n_head=4,
            hidden_dropout=0.0, attention_dropout=0.0, pad_token_id=0,
        )
    )  # fmt: skip


def _gemma2() -> nn.Module:
    return Gemma2ForCausalLM(Gemma2Config(**_DECODER, head_dim=8, sliding_window=4))


def _qwen2() -> nn.Module:
    return Qwen2ForCausalLM(Qwen2Config(**_DECODER))


def _mixtral() -> nn.Module:
    return MixtralForCausalLM(
        MixtralConfig(
            **_DECODER, num_local_experts=4, num_experts_per_tok=2, experts_implementation="eager"
        )
    )


def _qwen2_moe() -> nn.Module:
    return Qwen2MoeForCausalLM(
        Qwen2MoeConfig(
            **_DECODER, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
            shared_expert_intermediate_size=32,
        )
    )  # fmt: skip


def _mamba() -> nn.Module:
    return MambaForCausalLM(
        MambaConfig(
            vocab_size=VOCAB, hidden_size=HIDDEN, state_size=4, num_hidden_layers=LAYERS,
            time_step_rank=4, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        )
    )  # fmt: skip


def _bert() -> nn.Module:
    return BertForMaskedLM(BertConfig(**_ENCODER))


def _albert() -> nn.Module:
    return AlbertForMaskedLM(AlbertConfig(**_ENCODER, embedding_size=16))


def _deberta_v2(layers: int = LAYERS) -> nn.Module:
    return DebertaV2ForMaskedLM(
        DebertaV2Config(
            **{**_ENCODER, "num_hidden_layers": layers}, relative_attention=True, pos_att_type=["p2c", "c2p"],
            max_relative_positions=8, position_biased_input=False,
        )
    )  # fmt: skip


def _t5(layers: int = 2) -> nn.Module:
    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCAB, d_model=HIDDEN, d_kv=8, d_ff=64, num_layers=layers, num_heads=4,
            dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0, eos_token_id=2,
        )
    )  # fmt: skip


def _bart() -> nn.Module:
    return BartForConditionalGeneration(
        BartConfig(
            vocab_size=VOCAB, d_model=HIDDEN, encoder_layers=2, decoder_layers=2,
            encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=64,
            decoder_ffn_dim=64, max_position_embeddings=64, dropout=0.0, pad_token_id=0,
            bos_token_id=1, eos_token_id=2, decoder_start_token_id=2, forced_eos_token_id=None,
        )
    )  # fmt: skip


def _vit() -> nn.Module:
    return ViTForImageClassification(
        ViTConfig(
            **_VISION, hidden_size=HIDDEN, intermediate_size=64, num_hidden_layers=LAYERS,
            num_attention_heads=4, image_size=32, patch_size=8, num_labels=5,
        )
    )  # fmt: skip


def _swin() -> nn.Module:
    return SwinForImageClassification(
        SwinConfig(
            **_VISION, image_size=32, patch_size=4, embed_dim=16, depths=[2, 2], num_heads=[2, 4],
            window_size=4, drop_path_rate=0.0, num_labels=5,
        )
    )  # fmt: skip


def _convnext() -> nn.Module:
    return ConvNextForImageClassification(
        ConvNextConfig(
            num_stages=3, hidden_sizes=[16, 24, 32], depths=[1, 2, 2], num_labels=5,
            layer_scale_init_value=0.1, image_size=32,
        )
    )  # fmt: skip


def _segformer() -> nn.Module:
    return SegformerForImageClassification(
        SegformerConfig(
            num_encoder_blocks=2, depths=[2, 2], sr_ratios=[2, 1], hidden_sizes=[16, 32],
            patch_sizes=[7, 3], strides=[4, 2], num_attention_heads=[2, 4], mlp_ratios=[2, 2],
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, drop_path_rate=0.0,
            classifier_dropout_prob=0.0, num_labels=5,
        )
    )  # fmt: skip


def _wav2vec2() -> nn.Module:
    return Wav2Vec2ForCTC(
        Wav2Vec2Config(
            vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=64, num_hidden_layers=LAYERS,
            num_attention_heads=4, conv_dim=(16, 16), conv_kernel=(8, 4), conv_stride=(8, 4),
            num_feat_extract_layers=2, num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=4,
            hidden_dropout=0.0, activation_dropout=0.0, attention_dropout=0.0,
            feat_proj_dropout=0.0, final_dropout=0.0, layerdrop=0.0, apply_spec_augment=False,
            ctc_loss_reduction="mean", pad_token_id=0,
        )
    )  # fmt: skip


def _whisper() -> nn.Module:
    return WhisperForConditionalGeneration(
        WhisperConfig(
            vocab_size=VOCAB, d_model=HIDDEN, encoder_layers=2, decoder_layers=2,
            encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=64,
            decoder_ffn_dim=64, num_mel_bins=16, max_source_positions=12, max_target_positions=16,
            dropout=0.0, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
            begin_suppress_tokens=None, suppress_tokens=None,
        )
    )  # fmt: skip


def _clip() -> nn.Module:
    tower = {
        "hidden_size": HIDDEN, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "projection_dim": 16,
    }  # fmt: skip
    return CLIPModel(
        CLIPConfig(
            text_config=dict(
                **tower, vocab_size=VOCAB, max_position_embeddings=16, eos_token_id=2,
                bos_token_id=1, pad_token_id=0,
            ),
            vision_config=dict(**tower, image_size=32, patch_size=8),
            projection_dim=16,
        )
    )  # fmt: skip


CASES: dict[str, Case] = {
    "gpt2": Case("decoder", _gpt2, _causal, ("transformer.h*3",), loss=_next_token),
    "llama": Case("decoder", _llama, _causal, ("model.layers*3",), exact=False),
    "gpt_neox": Case("decoder", _gpt_neox, _causal, ("gpt_neox.layers*3",), loss=_next_token),
    "opt": Case("decoder", _opt, _causal, ("model.decoder.layers*3",), loss=_next_token),
    "bloom": Case("decoder", _bloom, _causal, ("transformer.h*3",), loss=_next_token),
    "gemma2": Case("decoder", _gemma2, _causal, ("model.layers*3",), exact=False),
    "qwen2": Case("decoder", _qwen2, _causal, ("model.layers*3",), exact=False),
    "mixtral": Case("mixture of experts", _mixtral, _causal, ("model.layers*3",), exact=False),
    "qwen2_moe": Case(
        "mixture of experts", _qwen2_moe, _causal, ("model.layers*3",), dtype=torch.float32
    ),
    "mamba": Case("state space", _mamba, _causal, ("backbone.layers*3",), exact=False),
    "bert": Case("encoder", _bert, _masked, ("bert.encoder.layer*3",)),
    "albert": Case("encoder", _albert, _masked, ("albert.encoder.albert_layer_groups*1",)),
    "deberta_v2": Case("encoder", _deberta_v2, _masked, ("deberta.encoder.layer*3",)),
    "t5": Case("encoder-decoder", _t5, _pair, ("encoder.block*2", "decoder.block*2"), exact=False),
    "bart": Case(
        "encoder-decoder", _bart, _pair, ("model.encoder.layers*2", "model.decoder.layers*2")
    ),
    "vit": Case(
        "vision",
        _vit,
        _classified,
        ("vit.embeddings.patch_embeddings.projection", "vit.layers*3"),
    ),
    "swin": Case(
        "vision",
        _swin,
        _classified,
        ("swin.encoder.layers.0.blocks*2", "swin.encoder.layers.1.blocks*2"),
        min_unit_numel=2500,
    ),
    "convnext": Case(
        "vision",
        _convnext,
        _classified,
        (
            "convnext.encoder.stages.0",
            "convnext.encoder.stages.1.layers*2",
            "convnext.encoder.stages.2.downsampling_layer.1",
            "convnext.encoder.stages.2.layers*2",
        ),
        min_unit_numel=2500,
    ),
    "segformer": Case(
        "vision",
        _segformer,
        _classified,
        (
            "segformer.stages.0.blocks*2",
            "segformer.stages.1.patch_embeddings.proj",
            "segformer.stages.1.blocks*2",
        ),
        min_unit_numel=2500,
    ),
    "wav2vec2": Case("speech", _wav2vec2, _spoken, ("wav2vec2.encoder.layers*3",), exact=False),
    "whisper": Case(
        "speech", _whisper, _transcribed, ("model.encoder.layers*2", "model.decoder.layers*2")
    ),
    "clip": Case(
        "multimodal",
        _clip,
        _captioned,
        (
            "text_model.encoder.layers*2",
            "vision_model.embeddings.patch_embedding",
            "vision_model.encoder.layers*2",
        ),
        loss=_mean_match,
    ),
}


# --- adapters -------------------------------------------------------------------------------------


class Adapted(nn.Module):
    """A frozen bfloat16 layer beside a trained low-rank one in float32."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / 4)
        self.up = nn.Parameter(torch.randn(base.out_features, rank) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + (x.float() @ self.down.T @ self.up.T).to(x.dtype)


def make_adapted() -> nn.Module:
    model = make(CASES["llama"]).bfloat16().requires_grad_(False)
    torch.manual_seed(7)
    for layer in model.model.layers:
        for name in ("q_proj", "v_proj"):
            setattr(layer.self_attn, name, Adapted(getattr(layer.self_attn, name)))
    return model
