"""Files and folders of others: read lazily and exactly, and nothing in them is executed."""

import contextlib
import pickle
from collections import Counter, OrderedDict, defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from shardwise.checkpoint.foreign.dcp import METADATA_FILE, read_dcp
from shardwise.checkpoint.foreign.folders import read_folders
from shardwise.checkpoint.foreign.names import PLAIN
from shardwise.checkpoint.foreign.pickles import loads
from shardwise.checkpoint.foreign.zips import LazyTensor, TorchFile, Window
from shardwise.core.errors import UsageError
from tests.checkpoint import fsdp2
from tests.checkpoint.hostile import evil_pickles, memo_bomb, nest, saved, zip_with

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
EVIL = sorted(evil_pickles(Path("mark")))


def read(data: bytes):
    return loads(data, "the file", PLAIN)


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


# --- pickles ----------------------------------------------------------------------------------

PLAIN_VALUES = {
    "numbers": [0, 1, -1, 255, 65536, 2**31, 2**70, -(2**70), 0.5, float("inf"), True, None],
    "texts": ["", "ä", "x" * 300, "\ud800", b"", b"\x00\xff", b"y" * 300, bytearray(b"z")],
    "nested": {"a": (1, (2,), (3, 4), (5, 6, 7), (8, 9, 10, 11)), 3: [[], {}, ()], (1, "b"): None},
    "sets": [{1, 2}, frozenset({3})],
    "dicts": [OrderedDict(a=1, b=2), Counter("aab"), defaultdict(list, x=[1])],
    "torch": [torch.Size([2, 3]), torch.float32, torch.bfloat16],
    "paths": Path("/a/b"),
    "complex": 1 + 2j,
    "numpy": [np.float64(1.5), np.int32(-3), np.bool_(True)],
}


class TestPickles:
    @pytest.mark.parametrize("protocol", [2, 3, 4, 5])
    @pytest.mark.parametrize("name", PLAIN_VALUES)
    def test_plain_values_are_what_was_pickled(self, name: str, protocol: int) -> None:
        found = read(pickle.dumps(PLAIN_VALUES[name], protocol=protocol))
        assert found == (str(PLAIN_VALUES[name]) if name == "paths" else PLAIN_VALUES[name])

    def test_shared_values_stay_shared(self) -> None:
        value = [1]
        first, second = read(pickle.dumps((value, value)))
        assert first is second

    @pytest.mark.parametrize("name", EVIL)
    def test_hostile_pickles_are_refused_and_run_nothing(self, name: str, tmp_path: Path) -> None:
        mark = tmp_path / "mark"
        with pytest.raises(UsageError, match=r"^the file (asks for|uses opcode|is damaged)"):
            read(evil_pickles(mark)[name])
        assert not mark.exists()

    def test_pythons_own_unpickler_would_run_them(self, tmp_path: Path) -> None:
        pickle.loads(evil_pickles(tmp_path / "mark")["deep in a dict"])
        assert (tmp_path / "mark").exists()

    def test_the_refused_name_is_named(self) -> None:
        with pytest.raises(UsageError, match=r"'__builtin__\.eval'"):
            read(evil_pickles(Path("mark"))["eval"])

    def test_a_memo_takes_what_is_in_it(self) -> None:
        assert read(memo_bomb()) is None

    def test_deep_keys_are_refused_before_they_are_hashed(self) -> None:
        with pytest.raises(UsageError, match="damaged"):
            read(nest(50_000))

    def test_no_admitted_name_makes_memory_of_a_number(self) -> None:
        for name in ("bytearray", "bytes", "set"):
            with pytest.raises(UsageError, match="damaged"):
                read(f"\x80\x02cbuiltins\n{name}\nJ\xff\xff\xff\x7f\x85R.".encode("latin1"))

    def test_copies_of_what_is_in_the_memo_have_an_end(self) -> None:
        text = b"X" + (1 << 20).to_bytes(4, "little") + b"x" * (1 << 20)
        make = b"c_codecs\nencode\nh\x01X\x06\x00\x00\x00latin1\x86R"
        with pytest.raises(UsageError, match="damaged"):
            read(b"\x80\x02(" + text + b"q\x01" + make * 1000 + b"t.")

    def test_numbers_have_a_length(self) -> None:
        with pytest.raises(UsageError, match="damaged"):
            read(b"\x80\x02\x8b\x00\x00\x10\x00" + b"\xff" * (1 << 20) + b".")

    def test_names_in_messages_cannot_move_the_cursor(self) -> None:
        with pytest.raises(UsageError) as caught:
            read(b"\x80\x02cos\n\x1b[2Jsystem\n.")
        assert "\x1b" not in str(caught.value)

    def test_every_cut_is_an_error(self) -> None:
        data = pickle.dumps(PLAIN_VALUES["nested"], protocol=4)
        for length in range(len(data)):
            with pytest.raises(UsageError, match="damaged"):
                read(data[:length])

    def test_flipped_bits_never_crash(self) -> None:
        data = bytearray(pickle.dumps([PLAIN_VALUES[n] for n in ("numbers", "nested", "dicts")], 2))
        for at in range(len(data)):
            for bit in range(8):
                data[at] ^= 1 << bit
                with contextlib.suppress(UsageError):
                    read(bytes(data))
                data[at] ^= 1 << bit

    def test_the_list_has_no_code_of_others(self) -> None:
        """What a file may name is ours, a dtype, or inert."""
        kinds = {type(value).__module__.split(".")[0] for value in PLAIN.values()}
        assert kinds == {"shardwise", "torch"}
        assert all(isinstance(v, torch.dtype) for v in PLAIN.values() if "torch" in str(type(v)))


# --- files of torch.save ----------------------------------------------------------------------


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    base = torch.randn(6, 8)
    dtypes = (torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.uint16)
    found = {str(dtype): torch.arange(7).to(dtype) for dtype in dtypes}
    found |= {"float8": torch.randn(5).to(torch.float8_e4m3fn), "scalar": torch.tensor(3.5)}
    found |= {"empty": torch.empty(0, 4), "whole": base, "rows": base[2:4], "turned": base.T}
    return found | {"column": base[:, 3], "parameter": torch.nn.Parameter(torch.randn(3, 2))}


def loaded(path: Path):
    return TorchFile(Window(path)).value


class TestFiles:
    def test_tensors_are_read_exactly(self, tmp_path: Path) -> None:
        values = tensors()
        torch.save({"model": values, "step": 3}, tmp_path / "a.pt")
        found = loaded(tmp_path / "a.pt")
        assert found["step"] == 3
        assert found["model"].keys() == values.keys()
        for name, value in values.items():
            lazy = found["model"][name]
            assert isinstance(lazy, LazyTensor)
            assert (lazy.shape, lazy.dtype) == (tuple(value.shape), value.dtype), name
            assert torch.equal(lazy.full(), value.detach()), name
            flat = value.detach().reshape(-1)
            middle = flat.numel() // 2
            assert torch.equal(lazy.flat(middle, flat.numel()), flat[middle:]), name

    def test_only_what_is_asked_for_is_read(self, tmp_path: Path) -> None:
        torch.save([torch.zeros(1000), torch.arange(1000)], tmp_path / "a.pt")
        data = bytearray((tmp_path / "a.pt").read_bytes())
        first, second = loaded(write(tmp_path / "a.pt", bytes(data)))
        data[first.storage.record.begin :] = b""  # the data of both is gone
        write(tmp_path / "a.pt", bytes(data))
        with pytest.raises(UsageError, match="ends before its data does"):
            second.flat(0, 1)

    def test_a_tensor_with_attributes_comes_without(self, tmp_path: Path) -> None:
        tensor = torch.nn.Parameter(torch.ones(3))
        tensor.note = "mine"
        torch.save(tensor, tmp_path / "a.pt")
        assert torch.equal(loaded(tmp_path / "a.pt").full(), torch.ones(3))

    @pytest.mark.parametrize("name", EVIL)
    def test_hostile_files_run_nothing(self, name: str, tmp_path: Path) -> None:
        mark = tmp_path / "mark"
        file = write(tmp_path / "a.pt", zip_with(evil_pickles(mark)[name]))
        with pytest.raises(UsageError, match=r"a\.pt"):
            loaded(file)
        assert not mark.exists()

    def test_every_flipped_byte_of_a_file_is_found(self, tmp_path: Path) -> None:
        """Of pickles and data; what pads the zip may be anything."""
        data = bytearray(saved({"a": torch.arange(9), "b": "text"}))
        path = write(tmp_path / "a.pt", bytes(data))
        for record in TorchFile(Window(path)).records.values():
            for at in range(record.begin, record.begin + record.num_bytes):
                data[at] ^= 4
                write(path, bytes(data))
                with pytest.raises(UsageError, match=r"damaged|big-endian"):
                    list(TorchFile(Window(path)).verify())
                data[at] ^= 4

    def test_files_without_checksums_are_read_too(self, tmp_path: Path) -> None:
        torch.serialization.set_crc32_options(False)
        try:
            torch.save([torch.arange(9)], tmp_path / "a.pt")
        finally:
            torch.serialization.set_crc32_options(True)
        file = TorchFile(Window(tmp_path / "a.pt"))
        assert not file.has_checksums
        assert torch.equal(file.value[0].full(), torch.arange(9))

    def test_every_cut_of_a_file_is_found(self, tmp_path: Path) -> None:
        data = saved({"a": torch.arange(9)})
        for length in range(0, len(data), 7):
            path = write(tmp_path / "a.pt", data[:length])
            with pytest.raises(UsageError, match=r"a\.pt"):
                TorchFile(Window(path)).value

    def test_what_is_no_file_of_torch(self, tmp_path: Path) -> None:
        torch.save([1], tmp_path / "old.pt", _use_new_zipfile_serialization=False)
        for name, match in (("old.pt", "old format"), ("none.pt", "cannot be read")):
            with pytest.raises(UsageError, match=match):
                loaded(tmp_path / name)
        with pytest.raises(UsageError, match="cannot be read"):
            loaded(tmp_path)

    def test_tensors_larger_than_their_storage_are_refused(self, tmp_path: Path) -> None:
        data = saved(torch.arange(9))
        inner = TorchFile(Window(write(tmp_path / "a.pt", data)))
        record = inner.records["archive/data.pkl"]
        text = inner.window.read(record.begin, record.num_bytes)
        # The shape (9,), written as BININT1 9, TUPLE1, becomes (200,); also with a stride of 0.
        assert text.count(b"K\x09\x85") == 1
        for stride, change in ((b"K\x01", b"K\xc8\x85"), (b"K\x00", b"K\xc8\x85")):
            changed = text.replace(b"K\x09\x85", change)
            changed = changed.replace(b"K\x01\x85", stride + b"\x85")
            bad = zip_with(changed, **{"data/0": torch.arange(9).numpy().tobytes()})
            with pytest.raises(UsageError, match="larger than its storage"):
                loaded(write(tmp_path / "a.pt", bad))

    def test_storages_of_another_size_or_place_are_refused(self, tmp_path: Path) -> None:
        inner = TorchFile(Window(write(tmp_path / "a.pt", saved(torch.arange(9)))))
        record = inner.records["archive/data.pkl"]
        text = inner.window.read(record.begin, record.num_bytes)
        bad = zip_with(text, **{"data/0": b"short"})
        with pytest.raises(UsageError, match="has 5 bytes instead of those of 9 elements"):
            loaded(write(tmp_path / "a.pt", bad))
        with pytest.raises(UsageError, match="does not have its record"):
            loaded(write(tmp_path / "a.pt", zip_with(text, other=b"x")))


# --- folders of DCP ---------------------------------------------------------------------------


class TestFolders:
    @pytest.mark.parametrize("layout", fsdp2.LAYOUTS)
    def test_every_tensor_and_state_has_the_same_bits(self, layout: str, saved_by_fsdp2) -> None:
        folder, full = saved_by_fsdp2[0], saved_by_fsdp2[1]["tensors"]
        found = read_folders(folder / layout)
        tensors = {tensor.name: tensor for tensor in found.tensors}
        assert tensors.keys() == {name for name in full if not name.startswith("state.")}
        for name, tensor in tensors.items():
            values = {name: tensor.value}
            values |= {f"state.{name}.{key}": state for key, state in tensor.states.items()}
            for full_name, value in values.items():
                expected = full[full_name].reshape(-1)
                if isinstance(value, float):
                    assert value == expected.item() == 2.0
                    continue
                assert torch.equal(value.flat(0, expected.numel()), expected), full_name
                middle = expected.numel() // 3
                assert torch.equal(value.flat(middle, len(expected)), expected[middle:])
            is_parameter = f"state.{name}.step" in full
            assert tensor.trained is is_parameter
            if is_parameter:
                assert tensor.states.keys() == {"step", "exp_avg", "exp_avg_sq"}
                is_large = len(tensor.value.shape) > 1
                assert tensor.options["weight_decay"] == (0.3 if is_large else 0.1), name
                assert tensor.options["lr"] == (1e-2 if is_large else 3e-3)
        assert sum(found.verify()) >= found.num_bytes
        said = {"accelerate": "scheduler", "titan": "train_state.seen, train_state.step"}
        assert said.get(layout, "") in ", ".join(found.left)

    def test_any_box_is_read(self, saved_by_fsdp2) -> None:
        folder, full = saved_by_fsdp2[0], saved_by_fsdp2[1]["tensors"]
        found = read_dcp(folder / "titan")
        assert found.read_object("train_state.step") == 2
        for name in (name for name in full if full[name].dim() == 2 and name in found.tensors):
            expected = full[name]
            box = found.read_box(name, (1, 1), (expected.shape[0] - 2, expected.shape[1] - 1))
            assert torch.equal(box, expected[1:-1, 1:])
            assert torch.equal(found.read_box(name, (3, 2), (1, 4)), expected[3:4, 2:6])
        with pytest.raises(IndexError):
            found.read_box("scale", (1,), (5,))

    def test_hostile_metadata_runs_nothing(self, tmp_path: Path) -> None:
        for name, data in evil_pickles(tmp_path / "mark").items():
            write(tmp_path / METADATA_FILE, data)
            with pytest.raises(UsageError, match=METADATA_FILE):
                read_dcp(tmp_path)
            assert not (tmp_path / "mark").exists(), name

    def test_hostile_data_runs_nothing(self, tmp_path: Path) -> None:
        dcp.save({"a": torch.arange(4), "b": 3}, checkpoint_id=tmp_path, no_dist=True)
        found = read_dcp(tmp_path)
        place = found.objects["b"]
        evil = zip_with(evil_pickles(tmp_path / "mark")["a function"])
        write(tmp_path / place.file, b"\0" * place.begin + evil)
        moved = type(place)(place.file, place.begin, len(evil))
        bad = type(found)(tmp_path, found.tensors, {"x": moved}, {})
        with pytest.raises(UsageError, match=r"asks for 'posix\.mkdir'"):
            bad.read_object("x")
        assert not (tmp_path / "mark").exists()

    @pytest.mark.parametrize("name", ["../out.distcp", "/etc/passwd", "link/x.distcp", "a\\..\\b"])
    def test_files_outside_the_folder_are_refused(self, name: str, tmp_path: Path) -> None:
        folder = tmp_path / "ckpt"
        dcp.save({"a": torch.arange(4)}, checkpoint_id=folder, no_dist=True)
        (folder / "link").symlink_to(tmp_path)
        write(tmp_path / "x.distcp", b"")
        changed = _change_metadata(folder, "__0_0.distcp", name)
        assert changed == 1
        with pytest.raises(UsageError, match="leads out of the folder"):
            read_dcp(folder)

    def test_chunks_must_tile_their_tensor(self, tmp_path: Path) -> None:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        dcp.save({"a": torch.arange(4)}, checkpoint_id=tmp_path, no_dist=True)
        original = (tmp_path / METADATA_FILE).read_bytes()
        for boxes in ([], [(0, 3)], [(1, 3)], [(0, 5)], [(0, 4), (0, 4)], [(0, 2), (1, 2)]):
            metadata = pickle.loads(original)
            metadata.state_dict_metadata["a"].chunks = [
                ChunkStorageMetadata(torch.Size([o]), torch.Size([n])) for o, n in boxes
            ]
            write(tmp_path / METADATA_FILE, pickle.dumps(metadata))
            with pytest.raises(UsageError, match="do not cover its shape"):
                read_dcp(tmp_path)

    def test_flipped_bits_of_metadata_never_crash(self, tmp_path: Path) -> None:
        dcp.save({"a": torch.arange(4), "b": 3}, checkpoint_id=tmp_path, no_dist=True)
        data = bytearray((tmp_path / METADATA_FILE).read_bytes())
        for at in range(0, len(data), 2):
            data[at] ^= 1 << (at // 2 % 8)
            write(tmp_path / METADATA_FILE, bytes(data))
            try:
                found = read_dcp(tmp_path)
                found.read_box("a", (0,), found.tensors["a"].shape)
            except (UsageError, KeyError):
                pass
            data[at] ^= 1 << (at // 2 % 8)

    def test_data_of_another_size_is_refused(self, tmp_path: Path) -> None:
        dcp.save({"a": torch.arange(4)}, checkpoint_id=tmp_path, no_dist=True)
        found = read_dcp(tmp_path)
        place = found.tensors["a"].chunks[0].place
        data = saved_like(place.length)
        write(tmp_path / place.file, b"\0" * place.begin + data)
        with pytest.raises(UsageError, match=r"says \[4\]|cut or damaged"):
            read_dcp(tmp_path).read_box("a", (0,), (4,))
        write(tmp_path / place.file, b"")
        with pytest.raises(UsageError, match="has 0 bytes, but the checkpoint has data at"):
            read_dcp(tmp_path).read_box("a", (0,), (4,))


def saved_like(length: int) -> bytes:
    """A file of torch.save of a given length, with a tensor of another shape."""
    return saved(torch.arange(3))[:length].ljust(length, b"\0")


def _change_metadata(folder: Path, old: str, new: str) -> int:
    """Exchange a string in a folder's metadata; returns how often."""
    metadata = pickle.loads((folder / METADATA_FILE).read_bytes())
    count = 0
    for info in metadata.storage_data.values():
        if info.relative_path == old:
            info.relative_path, count = new, count + 1
    write(folder / METADATA_FILE, pickle.dumps(metadata))
    return count
