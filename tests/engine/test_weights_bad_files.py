"""Bad model files: each is a ValueError that names the file, says what is wrong and what to do, before memory is spent."""

from __future__ import annotations

import copy
import json
import re
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from engine.weights.gguf_header import read_header
from engine.weights.source import UnsupportedArchitecture, WeightSource, open_source
from tests.engine import gguf_files, tiny_models

HTML = b"<!DOCTYPE html><html><body>Please log in</body></html>" * 20
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:0000\nsize 12345\n"
REMEDY = re.compile(r"again|another|choose|check|merge|get |download|do not trust|update", re.IGNORECASE)


def _refusal(path: Path) -> str:
    """The message of the ValueError that opening ``path`` raises, made with little memory."""
    tracemalloc.start()
    try:
        with pytest.raises(ValueError) as caught:  # noqa: PT011 (each caller looks at the message)
            open_source(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    message = str(caught.value)
    assert REMEDY.search(message), f"says no remedy: {message}"
    assert peak < 20e6, f"{peak / 1e6:.0f} MB spent before refusing"
    return message


def _read_all(source: WeightSource) -> None:
    for name in source.names():
        source.read(name)


@pytest.fixture(scope="module")
def sound_gguf(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "sound.gguf"
    return gguf_files.write_gguf(path, tiny_models.make_model("qwen3")).read_bytes()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A sound sharded folder."""
    tiny_models.make_model("llama").save_pretrained(tmp_path, max_shard_size="100KB")
    assert open_source(tmp_path).names()
    return tmp_path


def _only_shard(folder: Path) -> Path:
    return sorted(folder.glob("*.safetensors"))[1]


def _file(tmp_path: Path, content: bytes, name: str = "model.gguf") -> Path:
    path = tmp_path / name
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "model.gguf is empty"),
        (b"GGUF", "ends after 4 bytes"),
        (HTML, "is a web page"),
        (b"\n  <html>" + HTML, "is a web page"),
        (LFS, "Git LFS pointer"),
        (b"PK\x03\x04" + bytes(100), "pickle"),
        (b"\x80\x02}q\x00" + bytes(100), "pickle"),
        (b"ggjt" + bytes(100), "is not a GGUF file: it starts with b'ggjt'"),
        (bytes(100), "is not a GGUF file"),
        (struct.pack("<4sIQQ", b"GGUF", 1, 0, 0), "version 1"),
        (struct.pack("<4sIQQ", b"GGUF", 9, 0, 0), "version 9"),
        (struct.pack(">4sIQQ", b"GGUF", 3, 0, 0), "big-endian"),
        (struct.pack("<4sIQQ", b"GGUF", 3, 1 << 60, 1), "counts 1152921504606846976 tensors"),
        (struct.pack("<4sIQQ", b"GGUF", 3, 1, 1 << 60), "more than fit the file"),
        (struct.pack("<4sIQQQ", b"GGUF", 3, 0, 1, 1 << 62) + bytes(9), "a key claims to be"),
        (struct.pack("<4sIQQQ", b"GGUF", 3, 0, 1, 1 << 25) + bytes(9), "a key would end at byte"),
        (struct.pack("<4sIQQQ1sI", b"GGUF", 3, 0, 1, 1, b"k", 77), "key k has the unknown type 77"),
        (struct.pack("<4sIQQQ1sIIQ", b"GGUF", 3, 0, 1, 1, b"k", 9, 4, 1 << 60), "the array k would end"),
        (struct.pack("<4sIQQQ1sIIQ", b"GGUF", 3, 0, 1, 1, b"k", 9, 8, 1 << 60), "the array k would end"),
        (struct.pack("<4sIQQQ1sIIQQ", b"GGUF", 3, 0, 1, 1, b"k", 9, 8, 1, 1 << 60), "the array k would end"),
        (struct.pack("<4sIQQQ1sIIQ", b"GGUF", 3, 0, 1, 1, b"k", 9, 9, 1), "an array of the unsupported type 9"),
        (struct.pack("<4sIQQQ1sI", b"GGUF", 3, 1, 0, 1, b"t", 99) + bytes(20), "tensor t has 99 dimensions"),
        (struct.pack("<4sIQQQ1sIQIQ", b"GGUF", 3, 1, 0, 1, b"t", 1, 8, 77, 0), "tensor t has the unknown type 77"),
        (struct.pack("<4sIQQQ1sIQIQ", b"GGUF", 3, 1, 0, 1, b"t", 1, 0, 0, 0), "impossible shape"),
        (struct.pack("<4sIQQQ1sIQIQ", b"GGUF", 3, 1, 0, 1, b"t", 1, 31, 2, 0), "impossible shape [31] for Q4_0"),
        (struct.pack("<4sIQQQ1sIQIQ", b"GGUF", 3, 1, 0, 1, b"t", 1, 1 << 62, 0, 0), "is truncated: tensor t"),
        (struct.pack("<4sIQQ", b"GGUF", 3, 0, 0), "'general.architecture'"),
    ],
)
def test_foreign_or_damaged_gguf_is_refused_in_words(content: bytes, words: str, tmp_path: Path) -> None:
    message = _refusal(_file(tmp_path, content))
    assert words in message
    assert "model" in message.split()[0]


@pytest.mark.parametrize("share", [0.001, 0.05, 0.3, 0.9, 0.999])
def test_truncated_gguf_is_refused_on_opening(share: float, sound_gguf: bytes, tmp_path: Path) -> None:
    message = _refusal(_file(tmp_path, sound_gguf[: int(len(sound_gguf) * share)]))
    assert "model.gguf" in message
    assert re.search("truncated|ends after|damaged", message)


def _with(metadata: dict[str, Any]) -> Callable[[Any], None]:
    """Overwrites or adds keys of a GGUF file under construction."""

    def fill(writer: Any) -> None:
        for key, value in metadata.items():
            writer.kv_data[0].pop(key, None)
            if isinstance(value, str):
                writer.add_string(key, value)
            elif isinstance(value, list):
                writer.add_array(key, value)
            elif isinstance(value, float):
                writer.add_float32(key, value)
            elif value is not None:
                writer.add_uint32(key, value)

    return fill


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"qwen3.block_count": 5}, "no tensor blk.4.attn_norm.weight"),
        ({"qwen3.block_count": 4_000_000_000}, "'block_count' is 4000000000"),
        ({"qwen3.block_count": None}, "does not say 'block_count'"),
        ({"qwen3.embedding_length": 128}, "has the shape [300, 96], but its configuration asks for [300, 128]"),
        ({"qwen3.embedding_length": "big"}, "'embedding_length' is 'big'"),
        ({"qwen3.attention.head_count_kv": 3}, "'attention.head_count_kv' is 3, but should be a divisor of the 4"),
        ({"qwen3.attention.head_count": [4, 4, 4, 2]}, "a different attention.head_count in each layer"),
        ({"qwen3.attention.value_length": 16}, "keys and values of different sizes"),
        ({"qwen3.attention.layer_norm_rms_epsilon": float("nan")}, "'attention.layer_norm_rms_epsilon' is nan"),
        ({"qwen3.rope.freq_base": 0.0}, "'rope.freq_base' is 0.0"),
        ({"qwen3.rope.scaling.type": "spiral"}, "the RoPE scaling 'spiral'"),
        ({"split.count": 3}, "one of 3 parts"),
        ({"general.type": "adapter"}, "is of the type 'adapter'"),
    ],
)
def test_gguf_whose_metadata_do_not_fit_is_refused(metadata: dict[str, Any], words: str, tmp_path: Path) -> None:
    model = tiny_models.make_model("qwen3")
    path = gguf_files.write_gguf(tmp_path / "model.gguf", model, fill_metadata=_with(metadata))
    assert words in _refusal(path)


def test_gguf_of_another_kind_says_what_runs(tmp_path: Path) -> None:
    model = tiny_models.make_model("qwen3")
    for metadata, words in (
        ({"general.architecture": "mamba"}, "'mamba'"),
        ({"qwen3.expert_count": 8}, "mixture of exp"),
    ):
        path = gguf_files.write_gguf(tmp_path / "model.gguf", model, fill_metadata=_with(metadata))
        with pytest.raises(UnsupportedArchitecture, match=words) as caught:
            open_source(path)
        assert "safetensors" in str(caught.value)


def test_gguf_without_a_head_per_layer_list_that_agrees_is_fine(tmp_path: Path) -> None:
    model = tiny_models.make_model("qwen3")
    fill = _with({"qwen3.attention.head_count": [4, 4, 4, 4], "qwen3.attention.head_count_kv": [2, 2, 2, 2]})
    spec = open_source(gguf_files.write_gguf(tmp_path / "model.gguf", model, fill_metadata=fill)).spec
    assert (spec.num_heads, spec.num_kv_heads) == (4, 2)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", [0, -1])
def test_weights_that_are_no_numbers_are_named_when_read(bad: float, place: int, tmp_path: Path) -> None:
    model = copy.deepcopy(tiny_models.make_model("qwen3"))
    model.model.layers[2].mlp.down_proj.weight.data.view(-1)[place] = bad
    model.save_pretrained(tmp_path / "folder")
    path = gguf_files.write_gguf(tmp_path / "model.gguf", model)
    for source, stored in (
        (open_source(path), "model.gguf: tensor blk.2.ffn_down.weight"),
        (open_source(tmp_path / "folder"), "model.safetensors: tensor model.layers.2.mlp.down_proj.weight"),
    ):
        assert source.read("layers.1.mlp_out").isfinite().all()
        with pytest.raises(ValueError, match=re.escape(stored)):
            source.read("layers.2.mlp_out")


def test_large_fp16_weights_whose_sum_overflows_are_not_called_damaged(tmp_path: Path) -> None:
    model = copy.deepcopy(tiny_models.make_model("qwen3")).half()
    model.model.layers[0].mlp.down_proj.weight.data.fill_(60000.0)
    model.save_pretrained(tmp_path)
    assert open_source(tmp_path).read("layers.0.mlp_out").max() == 60000


def test_file_that_shrinks_after_opening_is_an_error_not_a_crash(sound_gguf: bytes, folder: Path) -> None:
    path = _file(folder, sound_gguf)
    source = open_source(path)
    path.write_bytes(sound_gguf[: len(sound_gguf) // 2])
    with pytest.raises(ValueError, match=r"model.gguf ended in the middle of tensor"):
        _read_all(source)
    sharded = open_source(folder)
    shard = _only_shard(folder)
    shard.write_bytes(shard.read_bytes()[:1000])
    with pytest.raises(ValueError, match=f"{shard.name} ended in the middle of tensor"):
        _read_all(sharded)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (HTML, "is a web page"),
        (LFS, "Git LFS pointer"),
        (b"GGUF" + bytes(100), "is not a safetensors file"),
        (bytes(100), "is not a safetensors file"),
        (b"\xff" * 7 + b"\x7f{" + bytes(50), "is not a safetensors file"),
        (struct.pack("<Q", 10_000) + b'{"a":', "is truncated: its header alone should be 10000 bytes"),
        (struct.pack("<Q", 9) + b"{'a': 1}]", "its header is not readable"),
        (struct.pack("<Q", 8) + b'{"a": 1}', "the entry of tensor a is incomplete"),
        (b"[]", "is not a safetensors file"),
    ],
)
def test_damaged_shard_is_refused_in_words(content: bytes, words: str, folder: Path) -> None:
    shard = _only_shard(folder)
    shard.write_bytes(content)
    message = _refusal(folder)
    assert words in message
    assert message.startswith(shard.name)


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 60]}, "takes 64 bytes, but its place has 60"),
        ({"dtype": "F32", "shape": [1 << 40, 1 << 40], "data_offsets": [0, 64]}, "takes"),
        ({"dtype": "F32", "shape": [-4, -4], "data_offsets": [0, 64]}, "impossible shape"),
        ({"dtype": "F32", "shape": [4, 4.5], "data_offsets": [0, 64]}, "impossible shape"),
        ({"dtype": "F32", "shape": [4, 4], "data_offsets": [1 << 50, (1 << 50) + 64]}, "would end at byte"),
        ({"dtype": "F32", "shape": [4, 4], "data_offsets": [0]}, "incomplete"),
        ({"dtype": "F32", "shape": 4, "data_offsets": [0, 64]}, "incomplete"),
        ({"dtype": "F32"}, "incomplete"),
        (None, "incomplete"),
    ],
)
def test_impossible_entry_of_a_shard_is_refused(entry: Any, words: str, folder: Path) -> None:
    header = json.dumps({"odd": entry}).encode()
    _only_shard(folder).write_bytes(struct.pack("<Q", len(header)) + header + bytes(64))
    message = _refusal(folder)
    assert words in message
    assert "odd" in message


def test_truncated_shard_is_refused_on_opening(folder: Path) -> None:
    shard = _only_shard(folder)
    shard.write_bytes(shard.read_bytes()[:-10])
    assert "is truncated: tensor" in _refusal(folder)


def test_missing_shards_are_named(folder: Path) -> None:
    shard = _only_shard(folder)
    shard.unlink()
    message = _refusal(folder)
    assert "1 of" in message
    assert shard.name in message


def test_missing_shards_are_named_without_an_index_too(folder: Path) -> None:
    (folder / "model.safetensors.index.json").unlink()
    assert open_source(folder).names()
    shard = _only_shard(folder)
    shard.unlink()
    assert f"weight files are missing in {folder}: {shard.name}." in _refusal(folder)


def test_adapter_is_not_taken_for_a_model(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("{}")
    assert "holds an adapter (LoRA)" in _refusal(folder)


def test_index_may_not_point_out_of_its_folder(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    for content, words in (
        ('{"weight_map": {"a": "../../secrets.safetensors"}}', "outside of its folder"),
        ('{"weight_map": {"a": 3}}', "no weight_map"),
        ("{}", "no weight_map"),
        ("[1, 2]", "no JSON object"),
        ("not json", "not readable as JSON"),
    ):
        index.write_text(content)
        assert words in _refusal(folder)


def test_missing_tensor_and_wrong_shape_name_the_tensor(tmp_path: Path) -> None:
    tiny_models.make_model("llama").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    sound = load_file(file)
    name = "model.layers.3.self_attn.v_proj.weight"
    save_file({key: value for key, value in sound.items() if key != name}, file)
    assert f"no tensor {name}" in _refusal(tmp_path)
    save_file(sound | {name: torch.zeros(7, 96)}, file)
    assert f"tensor {name} has the shape [7, 96], but its configuration asks for [32, 96]" in _refusal(tmp_path)
    save_file({key: value for key, value in sound.items() if key != "lm_head.weight"}, file)
    assert "no tensor lm_head.weight" in _refusal(tmp_path)
    save_file(sound | {name: torch.zeros(32, 96, dtype=torch.int8)}, file)
    with pytest.raises(UnsupportedArchitecture, match=f"{name} is stored as I8"):
        open_source(tmp_path)


def test_config_that_is_missing_or_foreign_is_said(folder: Path) -> None:
    config = folder / "config.json"
    sound = json.loads(config.read_text())
    for content, words in (
        ("<html>", "config.json is not readable as JSON"),
        ("[]", "config.json holds no JSON object"),
        ("{}", "config.json does not say 'model_type'"),
        (json.dumps(sound | {"hidden_size": None}), "config.json does not say 'hidden_size'"),
        (json.dumps(sound | {"num_key_value_heads": 4}), "a divisor of the 6 query heads"),
        (json.dumps(sound | {"vocab_size": "many"}), "'vocab_size' is 'many'"),
        (json.dumps(sound | {"architectures": ["LlamaForSequenceClassification"]}), "does not write text"),
    ):
        config.write_text(content)
        assert words in _refusal(folder)
    config.write_bytes(b"\xff\xfe\x00")
    assert "not readable as JSON" in _refusal(folder)
    config.unlink()
    assert "no config.json" in _refusal(folder)


def test_kinds_only_transformers_may_run_are_told_apart(folder: Path) -> None:
    config = folder / "config.json"
    sound = json.loads(config.read_text())
    for change in (
        {"model_type": "gpt_neox"},
        {"quantization_config": {"quant_method": "fp8"}},
        {"hidden_act": "relu2"},
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}},
    ):
        config.write_text(json.dumps(sound | change))
        with pytest.raises(UnsupportedArchitecture):
            open_source(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "model.ckpt", "model.PKL"])
def test_pickles_are_refused_with_the_reason(name: str, tmp_path: Path) -> None:
    path = _file(tmp_path, b"\x80\x02.", name)
    for place in (path, tmp_path):
        message = _refusal(place)
        assert "pickle" in message
        assert "run any code" in message


def test_places_without_a_model_are_said(tmp_path: Path, sound_gguf: bytes) -> None:
    assert "There is no file or folder at" in _refusal(tmp_path / "nowhere")
    assert "holds no model" in _refusal(tmp_path)
    _file(tmp_path, sound_gguf, "a.gguf")
    assert "holds GGUF files. Choose one of them: a.gguf" in _refusal(tmp_path)
    assert "cannot be read" in _refusal(tmp_path / ("x" * 300))  # longer than a file name may be
    assert "There is no file or folder at" in _refusal(tmp_path / "nul\0byte")


def test_unreadable_file_says_so(tmp_path: Path, sound_gguf: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _file(tmp_path, sound_gguf)

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "open", refuse)
    message = _refusal(path)
    assert "cannot be read: Permission denied" in message


@pytest.mark.parametrize("part", ["with space", "ünïcode-模型-🦙", "a" * 120])
def test_spaces_other_scripts_and_long_paths_are_fine(part: str, tmp_path: Path, sound_gguf: bytes) -> None:
    place = tmp_path / part / part
    place.mkdir(parents=True)
    assert open_source(_file(place, sound_gguf, f"{part}.gguf")).read("final_norm").shape == (96,)
    tiny_models.make_model("llama").save_pretrained(place)
    source = open_source(place)
    assert source.spec.name == part
    assert source.read("final_norm").shape == (96,)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_damage_to_a_gguf_header_is_a_value_error_or_harmless(
    data: st.DataObject, sound_gguf: bytes, tmp_path: Path
) -> None:
    broken = bytearray(sound_gguf)
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(4, 4000))
        new = data.draw(st.binary(min_size=1, max_size=8))
        broken[place : place + len(new)] = new
    path = _file(tmp_path, bytes(broken[: data.draw(st.integers(0, len(broken)))]))
    try:
        source = open_source(path)
    except ValueError:
        return
    for name in source.names():
        try:
            source.read(name)
        except ValueError as error:
            assert "not numbers" in str(error)  # noqa: PT017 (reading may also succeed)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_damage_to_a_shard_is_a_value_error_or_harmless(data: st.DataObject, folder: Path) -> None:
    shard = _only_shard(folder)
    sound = shard.read_bytes()
    broken = bytearray(sound)
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, 600))
        new = data.draw(st.binary(min_size=1, max_size=8))
        broken[place : place + len(new)] = new
    shard.write_bytes(bytes(broken[: data.draw(st.integers(0, len(broken)))]))
    try:
        open_source(folder)
    except ValueError:
        pass
    finally:
        shard.write_bytes(sound)


def test_header_values_come_back_as_written(tmp_path: Path) -> None:
    def fill(writer: Any) -> None:
        writer.add_bool("a.bool", True)
        writer.add_int8("a.int8", -5)
        writer.add_uint64("a.uint64", 1 << 40)
        writer.add_float64("a.float64", 0.1)
        writer.add_float32("a.float32", 1e-6)
        writer.add_string("a.text", "naïve 模型")
        writer.add_array("a.texts", ["x", "", "é"])
        writer.add_array("a.numbers", [1, -2, 3])
        writer.add_array("a.flags", [True, False])

    path = gguf_files.write_gguf(tmp_path / "model.gguf", tiny_models.make_model("llama"), fill_metadata=fill)
    header = read_header(path)
    found = {key: value for key, value in header.metadata.items() if key.startswith("a.")}
    assert found == {
        "a.bool": True, "a.int8": -5, "a.uint64": 1 << 40, "a.float64": 0.1, "a.float32": 1e-6, "a.text": "naïve 模型",
        "a.texts": ["x", "", "é"], "a.numbers": [1, -2, 3], "a.flags": [True, False],
    }  # fmt: skip
    info = header.tensors["blk.1.attn_k.weight"]
    assert info.shape == (32, 96)
    assert info.num_bytes == 32 * 96 * 4
    raw = np.fromfile(path, np.float32, 32 * 96, offset=info.offset)
    assert np.isfinite(raw).all()
    assert raw.std() > 0
