"""Reading and writing folders: shards, index, atomic appearance, damage."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from quantkit.arch import family_of
from quantkit.checkpoint import INDEX, Checkpoint
from quantkit.checkpoint_writer import CheckpointWriter
from quantkit.errors import InputError, QuantkitError, StorageError


def write(output: Path, tensors: dict[str, torch.Tensor], **options: int | bool) -> None:
    with CheckpointWriter(output, **options) as writer:  # type: ignore[arg-type]
        for name, tensor in tensors.items():
            writer.add(name, tensor)
        writer.add_json("config.json", {"model_type": "llama", "dtype": "float32"})
        writer.finish()


def test_shards_and_index(tmp_path: Path) -> None:
    tensors = {f"t{i}": torch.randn(10, 10) for i in range(5)}  # 400 bytes each
    write(tmp_path / "out", tensors, shard_bytes=900)
    files = sorted(file.name for file in (tmp_path / "out").glob("*.safetensors"))
    assert files == [f"model-{i:05d}-of-00003.safetensors" for i in (1, 2, 3)]
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    assert index["metadata"]["total_size"] == 2000
    assert index["weight_map"]["t4"] == files[2]
    checkpoint = Checkpoint(tmp_path / "out")
    assert all(torch.equal(checkpoint.tensor(name), tensor) for name, tensor in tensors.items())


def test_one_file_when_it_fits(tmp_path: Path) -> None:
    write(tmp_path / "out", {"t": torch.randn(4), "wide": torch.randn(8, 8).T})
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors"]
    assert load_file(tmp_path / "out" / "model.safetensors")["t"].shape == (4,)
    modes = {file.stat().st_mode for file in (tmp_path / "out").iterdir()}
    assert len(modes) == 1, "weights are as readable as the files beside them"


def test_an_error_leaves_nothing_behind(tmp_path: Path) -> None:
    def fail_halfway() -> None:
        with CheckpointWriter(tmp_path / "out", shard_bytes=1) as writer:
            writer.add("a", torch.ones(4))
            writer.add("b", torch.ones(4))  # flushes the first shard
            assert any(writer.partial.iterdir())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_halfway()
    assert list(tmp_path.iterdir()) == []


def test_failed_verification_leaves_nothing_behind(tmp_path: Path) -> None:
    def refuse(folder: Path) -> None:
        assert (folder / "model.safetensors").exists()
        raise QuantkitError("not what was promised")

    with CheckpointWriter(tmp_path / "out") as writer:
        writer.add("a", torch.ones(4))
        with pytest.raises(QuantkitError, match="promised"):
            writer.finish(refuse)
    assert list(tmp_path.iterdir()) == []


def test_overwrite_only_checkpoints(tmp_path: Path) -> None:
    write(tmp_path / "out", {"a": torch.ones(4)})
    with pytest.raises(InputError, match="--overwrite"):
        write(tmp_path / "out", {"a": torch.zeros(4)})
    write(tmp_path / "out", {"a": torch.zeros(4)}, overwrite=True)
    assert Checkpoint(tmp_path / "out").tensor("a").sum() == 0
    precious = tmp_path / "photos"
    precious.mkdir()
    (precious / "cat.jpg").write_bytes(b"meow")
    with pytest.raises(InputError, match="not a checkpoint"):
        write(precious, {"a": torch.ones(4)}, overwrite=True)
    assert (precious / "cat.jpg").exists()


def test_more_than_the_disk_holds_is_refused_before_writing(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="MB are free"):
        CheckpointWriter(tmp_path / "out", expected_bytes=1 << 62)


def test_missing_shard_is_named(tmp_path: Path) -> None:
    write(tmp_path / "out", {f"t{i}": torch.randn(10, 10) for i in range(3)}, shard_bytes=500)
    (tmp_path / "out" / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(StorageError, match=r"model-00002-of-00003\.safetensors is missing"):
        Checkpoint(tmp_path / "out")


def test_index_that_promises_too_much(tmp_path: Path) -> None:
    write(tmp_path / "out", {f"t{i}": torch.randn(10, 10) for i in range(3)}, shard_bytes=500)
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    index["weight_map"]["ghost"] = "model-00001-of-00003.safetensors"
    (tmp_path / "out" / INDEX).write_text(json.dumps(index))
    with pytest.raises(StorageError, match="ghost"):
        Checkpoint(tmp_path / "out")


def test_pickle_is_not_opened(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(StorageError, match="pickle"):
        Checkpoint(tmp_path)


def test_legacy_gptq_file_name(tiny_model: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_model, tmp_path / "old")
    (tmp_path / "old" / "model.safetensors").rename(tmp_path / "old" / "gptq_model-4bit-128g.safetensors")
    assert Checkpoint(tmp_path / "old").tensors.keys() == Checkpoint(tiny_model).tensors.keys()


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/secret.safetensors", "a/b.safetensors", "..", "", 7])
def test_an_index_names_files_of_its_own_folder_only(tmp_path: Path, name: object) -> None:
    """Else a checkpoint from a stranger would bring other files of this machine into what is served."""
    write(tmp_path / "secret", {"t0": torch.ones(3)})
    (tmp_path / "secret" / "model.safetensors").rename(tmp_path / "secret.safetensors")
    write(tmp_path / "out", {f"t{i}": torch.randn(10, 10) for i in range(5)}, shard_bytes=900)
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    index["weight_map"]["t0"] = name
    (tmp_path / "out" / INDEX).write_text(json.dumps(index))
    with pytest.raises(StorageError, match="which is no file of this folder"):
        Checkpoint(tmp_path / "out")


def test_two_writers_of_one_folder(tmp_path: Path) -> None:
    """The second is refused, the first goes on undisturbed, and afterwards another may write."""
    with CheckpointWriter(tmp_path / "out") as first:
        first.add("t0", torch.ones(3))
        with pytest.raises(InputError, match="is being written: process"), CheckpointWriter(tmp_path / "out"):
            pass
        first.add_json("config.json", {"model_type": "llama", "dtype": "float32"})
        first.finish()
    assert Checkpoint(tmp_path / "out").tensor("t0").tolist() == [1, 1, 1]
    assert [file.name for file in tmp_path.iterdir()] == ["out"]
    write(tmp_path / "out", {"t1": torch.ones(3)}, overwrite=True)
    assert list(Checkpoint(tmp_path / "out").tensors) == ["t1"]


def test_more_layers_than_any_model_has(tiny_model: Path) -> None:
    config = Checkpoint(tiny_model).config | {"num_hidden_layers": 4_294_967_295}
    with pytest.raises(InputError, match="no model has more than 10,000"):
        family_of(config).linears(config)
