"""Checkpoints in DeepSpeed's layout: every element and state at its place, and nothing executed."""

import shutil
from pathlib import Path

import pytest
import torch

from shardwise.checkpoint.foreign.contents import Foreign
from shardwise.checkpoint.foreign.deepspeed import read_deepspeed
from shardwise.checkpoint.foreign.zips import PIECE_BYTES, Window
from shardwise.core.errors import UsageError
from tests.checkpoint.hostile import evil_pickles, saved, zip_with
from tests.checkpoint.zero_layout import STATES, TAG, Model, write


def model(**changes: object) -> Model:
    """Odd sizes, a parameter smaller than the world, two groups, frozen, tied, buffers."""
    torch.manual_seed(0)
    first = {"a.weight": torch.randn(3, 5), "a.bias": torch.randn(7)}
    second = {"one": torch.randn(1), "embed": torch.randn(11, 3), "last": torch.randn(2, 2)}
    frozen = {"frozen": torch.randn(5, 3).bfloat16()}
    return Model([first, second], frozen, {"buffer": torch.arange(4)}, {"head": "embed"}, **changes)


def check(found: Foreign, expected: Model, *, has_groups: bool = True) -> None:
    tensors = {tensor.name: tensor for tensor in found.tensors}
    for number, group in enumerate(expected.groups):
        for name, value in group.items():
            tensor = tensors.pop(name)
            assert tensor.trained
            assert tensor.states.keys() == {"step", *STATES}
            assert tensor.states["step"] == 3
            for key in ("fp32", *STATES):
                stored = tensor.value if key == "fp32" else tensor.states[key]
                flat = expected.state(value, key).reshape(-1)
                assert (stored.shape, stored.dtype) == (tuple(value.shape), torch.float32)
                assert torch.equal(stored.flat(0, flat.numel()), flat), (name, key)
                inner = flat[flat.numel() // 3 : flat.numel() - 1]
                begin = flat.numel() // 3
                assert torch.equal(stored.flat(begin, begin + inner.numel()), inner)
            if has_groups:
                assert tensor.options["lr"] == 0.1 / (number + 1)
                assert tensor.options["betas"] == (0.9, 0.99)
    for name, value in (expected.frozen | expected.buffers).items():
        tensor = tensors.pop(name)
        assert not tensor.trained
        assert torch.equal(tensor.value.flat(0, value.numel()), value.reshape(-1))
    assert not tensors
    assert found.aliases == expected.shared
    assert found.step == 3


@pytest.mark.parametrize("world", [1, 2, 3, 8])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_element_is_at_its_place(stage: int, world: int, tmp_path: Path) -> None:
    expected = model()
    found = read_deepspeed(write(tmp_path, expected, stage=stage, world=world))
    check(found, expected)
    assert f"ZeRO-{stage}" in found.kind
    check(read_deepspeed(tmp_path / TAG), expected)  # the folder itself


def test_subgroups_of_zero_3(tmp_path: Path) -> None:
    expected = model()
    check(read_deepspeed(write(tmp_path, expected, stage=3, world=2, sub_groups=2)), expected)


def test_elastic_checkpoints(tmp_path: Path) -> None:
    expected = model()
    found = read_deepspeed(write(tmp_path, expected, stage=2, world=4, elastic=True))
    check(found, expected, has_groups=False)


def test_aligned_parameters_have_gaps_between_them(tmp_path: Path) -> None:
    expected = model()
    check(read_deepspeed(write(tmp_path, expected, stage=1, world=3, gap=5)), expected)


def test_weights_of_other_dtypes(tmp_path: Path) -> None:
    for dtype in (torch.float16, torch.float32):
        expected = model(dtype=dtype)
        check(read_deepspeed(write(tmp_path / str(dtype), expected, stage=1, world=2)), expected)


def test_what_is_left_is_said(tmp_path: Path) -> None:
    found = read_deepspeed(write(tmp_path, model(), stage=1, world=2, extra={"epoch": 7}))
    text = ", ".join(found.left)
    for part in ("learning rate scheduler", "client state (epoch)", "random number"):
        assert part in text


def test_no_more_is_read_than_asked_for(tmp_path: Path, monkeypatch) -> None:
    big = Model([{"big": torch.randn(1000, 512), "small": torch.randn(8)}])
    read, original = [], Window.read_into

    def counting(window: Window, begin: int, target: memoryview) -> None:
        read.append(len(target))
        original(window, begin, target)

    write(tmp_path, big, stage=2, world=2)
    monkeypatch.setattr(Window, "read_into", counting)
    found = read_deepspeed(tmp_path)
    assert sum(read) < 300_000  # files of 6 MB
    read.clear()
    found.tensors[0].value.flat(255_990, 256_010)  # across the ranks' border
    assert sum(read) == 20 * 4
    read.clear()
    total = sum(found.verify())
    assert total > 3 * 4 * 512_000
    assert max(read) <= PIECE_BYTES


# --- what does not fit is one clear sentence --------------------------------------------------


@pytest.fixture(scope="module")
def layouts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("layouts")
    for stage in (1, 3):
        write(folder / str(stage), model(), stage=stage, world=2)
    return folder


def copy(layouts: Path, stage: int, tmp_path: Path) -> Path:
    return Path(shutil.copytree(layouts / str(stage), tmp_path / "copy")) / TAG


OPTIM = "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
MODELS = {1: "mp_rank_00_model_states.pt", 3: "zero_pp_rank_1_mp_rank_00_model_states.pt"}


def read_all(folder: Path) -> None:
    for tensor in read_deepspeed(folder).tensors:
        tensor.value.flat(0, tensor.numel)


@pytest.mark.parametrize("stage", [1, 3])
class TestMistakes:
    def refused(self, folder: Path, match: str) -> None:
        with pytest.raises(UsageError, match=match) as caught:
            read_all(folder.parent)
        assert "\n" not in str(caught.value)

    def test_a_missing_file(self, stage: int, layouts: Path, tmp_path: Path) -> None:
        folder = copy(layouts, stage, tmp_path)
        (folder / OPTIM).unlink()
        self.refused(folder, r"saved by 2 ranks, but of files '\*_optim.* lacks those of \[1\]")

    def test_a_file_of_another_checkpoint(self, stage: int, layouts: Path, tmp_path: Path) -> None:
        folder = copy(layouts, stage, tmp_path)
        shutil.copy(folder / OPTIM, folder / OPTIM.replace("rank_1", "rank_2"))
        self.refused(folder, r"also has \[2\]")

    def test_files_of_two_checkpoints(self, stage: int, layouts: Path, tmp_path: Path) -> None:
        folder = copy(layouts, stage, tmp_path)
        shutil.copy(folder / OPTIM, folder / OPTIM.removeprefix("bf16_"))
        self.refused(folder, "has files of two checkpoints")

    def test_files_of_another_model(self, stage: int, layouts: Path, tmp_path: Path) -> None:
        folder = copy(layouts, stage, tmp_path)
        smaller = Model([{"a.weight": torch.randn(3, 5)}, {"embed": torch.randn(11, 3)}])
        other = write(tmp_path / "other", smaller, stage=stage, world=2) / TAG
        shutil.copy(other / OPTIM, folder / OPTIM)
        self.refused(folder, "does not fit the checkpoint|no part of")

    def test_a_huge_number_of_ranks(self, stage: int, layouts: Path, tmp_path: Path) -> None:
        folder = copy(layouts, stage, tmp_path)
        for file in folder.glob("*_optim_states.pt"):
            value = {"partition_count": 1 << 60, "fp32_flat_groups": []}
            file.write_bytes(saved({"optimizer_state_dict": value}))
        self.refused(folder, "was saved by 1152921504606846976 ranks")

    def test_model_parallel_parts(self, stage: int, layouts: Path, tmp_path: Path) -> None:
        folder = copy(layouts, stage, tmp_path)
        (folder / MODELS[stage].replace("mp_rank_00", "mp_rank_01")).write_bytes(b"")
        self.refused(folder, "one of several model-parallel parts")

    def test_experts_and_pipelines(self, stage: int, layouts: Path, tmp_path: Path) -> None:
        folder = copy(layouts, stage, tmp_path)
        (folder / "layer_00-model_00-model_states.pt").write_bytes(b"")
        self.refused(folder, "of a pipeline or of experts")

    def test_hostile_files_run_nothing(self, stage: int, layouts: Path, tmp_path: Path) -> None:
        folder, mark = copy(layouts, stage, tmp_path), tmp_path / "mark"
        for name in (OPTIM, MODELS[stage]):
            original = (folder / name).read_bytes()
            for data in evil_pickles(mark).values():
                (folder / name).write_bytes(zip_with(data))
                self.refused(folder, name)
                assert not mark.exists()
            (folder / name).write_bytes(original)

    def test_values_of_other_kinds(self, stage: int, layouts: Path, tmp_path: Path) -> None:
        folder = copy(layouts, stage, tmp_path)
        values = (None, [], {}, {"optimizer_state_dict": 3}, {"module": [1]}, torch.zeros(2))
        for name in (OPTIM, MODELS[stage]):
            original = (folder / name).read_bytes()
            for value in values:
                (folder / name).write_bytes(saved(value))
                if name == MODELS[3]:
                    self.refused(folder, "no 'frozen_param_fragments'")
                else:
                    self.refused(folder, "has no '")
            (folder / name).write_bytes(original)

    def test_cut_and_empty_files(self, stage: int, layouts: Path, tmp_path: Path) -> None:
        folder = copy(layouts, stage, tmp_path)
        for name in (OPTIM, MODELS[stage]):
            data = (folder / name).read_bytes()
            for length in (0, 100, len(data) // 2, len(data) - 1):
                (folder / name).write_bytes(data[:length])
                self.refused(folder, f"{name}.*(cut or damaged|not a file of torch.save)")
            (folder / name).write_bytes(data)

    def test_a_tag_that_leads_out(self, stage: int, layouts: Path, tmp_path: Path) -> None:
        folder = copy(layouts, stage, tmp_path)
        for tag in ("../elsewhere", "/etc", ".."):
            (folder.parent / "latest").write_text(tag)
            self.refused(folder, "leads out of the folder")
        (folder.parent / "latest").write_text("global_step9")
        self.refused(folder, "names 'global_step9', which is no folder")

    def test_a_link_that_leads_out(self, stage: int, layouts: Path, tmp_path: Path) -> None:
        folder = copy(layouts, stage, tmp_path)
        shutil.move(folder / OPTIM, tmp_path / "outside.pt")
        (folder / OPTIM).symlink_to(tmp_path / "outside.pt")
        self.refused(folder, "leads out of the folder")

    def test_flipped_bits_are_found(self, stage: int, layouts: Path, tmp_path: Path) -> None:
        folder = copy(layouts, stage, tmp_path)
        record = read_deepspeed(folder).tensors[0].value.pieces[0].source.storage.record
        name = OPTIM.replace("rank_1", "rank_0")
        data = bytearray((folder / name).read_bytes())
        data[record.begin] ^= 1
        (folder / name).write_bytes(bytes(data))
        with pytest.raises(UsageError, match=f"{name}' is damaged: record 'archive|{name}"):
            list(read_deepspeed(folder).verify())
