"""Which types of keys and values go together (FIELD 12): a pair without a kernel is refused by name, never read as another nor
quietly the slow way, and a choice that a model cannot have is grey with the reason."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from native_kernels import needs_kernels
from tiny_engine import drain, greedy, load, reply, save_model, text
from tiny_models import FAMILIES
from torch import Tensor

from engine.engine import Engine
from engine.events import StepRecord
from engine.kv.cache import KvCache
from engine.kv.codec import Codec, FewBits, Int8, Native
from engine.kv.layout import KvLayout
from engine.ops.cpu import native
from engine.ops.cpu.native.kernels import AttentionArgs, KvArgs, RopeArgs
from engine.options import Capabilities, entry, unavailable

VALUES = entry("kv_dtype").values
CODED = [value for value in VALUES if value != "native"]
HEAD_DIM, PAGES, PAGE, HEADS = 16, 3, 8, 2
ODD_HEAD_DIM = 18  # no multiple of 4

CODECS: dict[str, Codec] = {
    "fp32": Native(HEAD_DIM, torch.float32),
    "bf16": Native(HEAD_DIM, torch.bfloat16),
    "fp16": Native(HEAD_DIM, torch.float16),
    "fp64": Native(HEAD_DIM, torch.float64),
    "8 bits": Int8(HEAD_DIM),
    "4 bits": FewBits(HEAD_DIM, 4),
    "6 bits": FewBits(HEAD_DIM, 6),
}
HAVE_KERNELS = {("fp32", "fp32"), ("bf16", "bf16"), ("fp16", "fp16"), ("8 bits", "8 bits"), ("6 bits", "4 bits")}
PAIRS = list(itertools.product(CODECS, repeat=2))


def pages_of(codec: Codec) -> tuple[Tensor, ...]:
    return tuple(torch.zeros(PAGES, PAGE, HEADS, size, dtype=kind) for size, kind in codec.parts)


# -- pairs --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("keys", "values"), PAIRS)
def test_of_all_pairs_only_those_with_a_kernel_are_handed_to_one(keys: str, values: str) -> None:
    """The others would be read as what they are not: one field of the C structure says what both are."""
    parts = pages_of(CODECS[keys]), pages_of(CODECS[values])
    if (keys, values) in HAVE_KERNELS:
        args = KvArgs.of(*parts)
        assert args.keys == parts[0][0].data_ptr()
        assert args.values == parts[1][0].data_ptr()
        return
    with pytest.raises(ValueError, match="No kernel reads keys kept as") as refused:
        KvArgs.of(*parts)
    for codec in (CODECS[keys], CODECS[values]):
        assert f"kept as {codec.parts}" in str(refused.value)


@pytest.mark.parametrize("native_type", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kv_dtype", VALUES)
@pytest.mark.parametrize("head_dim", [8, 20, 64, 80, 256])
def test_every_choice_of_the_switch_is_a_pair_with_a_kernel(
    kv_dtype: str, native_type: torch.dtype, head_dim: int
) -> None:
    spec = replace(FAMILIES["llama"].spec, head_dim=head_dim)
    layout = KvLayout.of(spec, {"kv_dtype": kv_dtype}, native_type.itemsize)
    layer = KvCache(spec, PAGES, PAGE, native_type, layout=layout).layer(0)
    kinds = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
    wanted = {"native": kinds[native_type], "int8": 3, "int4": 4}
    assert set(wanted) == set(VALUES)
    assert KvArgs.of(layer.keys, layer.values).type == wanted[kv_dtype]


# -- the C kernels, if something wrong reached them all the same ----------------------------------


def codes(type_number: int, missing: str = "") -> tuple[KvArgs, list[Tensor]]:
    """Pages large enough for any type, and numbers of both unless one is ``missing``."""
    tensors = [torch.zeros(PAGES * PAGE * HEADS * 2048) for _ in range(4)]
    names = ("keys", "values", "key_numbers", "value_numbers")
    pointers = {name: tensor.data_ptr() for name, tensor in zip(names, tensors, strict=True) if name != missing}
    return KvArgs(type=type_number, **pointers), tensors


UNSOUND = [
    pytest.param(-1, "", HEAD_DIM, id="no such type"),
    pytest.param(5, "", HEAD_DIM, id="a type yet to come"),
    *(
        pytest.param(kind, missing, HEAD_DIM, id=f"{kind} without {missing}")
        for kind in (3, 4)
        for missing in ("key_numbers", "value_numbers")
    ),
    pytest.param(4, "", ODD_HEAD_DIM, id="int4 of 18 channels"),
    pytest.param(3, "", 1028, id="int8 of too large a head"),
]


class Step:
    """One token of ones that is written to and attends to the first slot of page 1, with the C calls for it."""

    def __init__(self, kv: KvArgs, head_dim: int) -> None:
        self._q, self._qkv = torch.ones(1, HEADS, head_dim), torch.ones(1, 3 * HEADS * head_dim)
        self.out = torch.full((1, HEADS * head_dim), 7.0)
        self._span, self._page, self._slot = torch.tensor([0, 1, 1, 0, -1, 1]), torch.tensor([1]), torch.tensor([PAGE])
        self._workspace = torch.zeros(1 << 21)
        sizes = {"num_heads": HEADS, "num_kv_heads": HEADS, "head_dim": head_dim}
        self._attention = AttentionArgs(
            q=self._q.data_ptr(),
            kv=kv,
            out=self.out.data_ptr(),
            spans=self._span.data_ptr(),
            pages=self._page.data_ptr(),
            workspace=self._workspace.data_ptr(),
            workspace_bytes=self._workspace.nbytes,
            num_spans=1,
            page_size=PAGE,
            scale=1.0,
            **sizes,
        )
        self._rope = RopeArgs(
            qkv=self._qkv.data_ptr(),
            slots=self._slot.data_ptr(),
            kv=kv,
            q=self._q.data_ptr(),
            rows=1,
            copies=1,
            eps=1e-5,
            **sizes,
        )

    def workspace(self) -> int:
        return call("rl_attention_workspace", self._attention)

    def attend(self) -> int:
        return call("rl_paged_attention", self._attention)

    def write(self) -> int:
        return call("rl_rope_and_write_kv", self._rope)


def call(name: str, args: ctypes.Structure) -> int:
    return int(native.function(name, ctypes.c_void_p)(ctypes.addressof(args)))


@needs_kernels
@pytest.mark.parametrize(("kind", "missing", "head_dim"), UNSOUND)
def test_c_refuses_to_read_or_write_what_it_does_not_know(kind: int, missing: str, head_dim: int) -> None:
    kv, tensors = codes(kind, missing)
    step = Step(kv, head_dim)
    assert step.workspace() == step.attend() == step.write() == -1
    assert (step.out == 7.0).all()
    assert all((tensor == 0).all() for tensor in tensors)


@needs_kernels
@pytest.mark.parametrize("kind", [0, 1, 2, 3, 4])
def test_the_same_step_with_a_type_that_c_knows_is_taken(kind: int) -> None:
    """So what is refused above is refused for its type."""
    kv, tensors = codes(kind)
    step = Step(kv, HEAD_DIM)
    assert step.write() == 0
    assert any((tensor != 0).any() for tensor in tensors)
    assert step.workspace() > 0
    assert step.attend() == 0
    torch.testing.assert_close(step.out, torch.ones(1, HEADS * HEAD_DIM), atol=0.02, rtol=0.01)


# -- what the user sees -------------------------------------------------------------------------


def test_a_choice_that_the_heads_cannot_have_is_grey_with_the_reason() -> None:
    assert "kv_dtype" not in unavailable(Capabilities(head_dim=HEAD_DIM))
    (refused,) = unavailable(Capabilities(head_dim=ODD_HEAD_DIM))["kv_dtype"].items()
    assert refused == ("int4", "int4 needs heads whose size is a multiple of 4; here it is 18. Choose int8.")


@pytest.fixture
def odd(tmp_path: Path) -> Iterator[Engine]:
    engine = load(save_model(tmp_path, ODD_HEAD_DIM))
    yield engine
    engine.close()


def test_a_model_with_such_heads_refuses_the_choice_and_goes_on(odd: Engine, tmp_path: Path) -> None:
    assert "multiple of 4; here it is 18" in odd.loaded_event().unavailable["kv_dtype"]["int4"]
    before = reply(odd, text(40))
    with pytest.raises(ValueError, match=r"kv_dtype=int4 .*multiple of 4; here it is 18\. Choose int8"):
        odd.apply({"kv_dtype": "int4"})
    assert odd.options["kv_dtype"] == "native"
    assert reply(odd, text(40)) == before
    odd.apply({"kv_dtype": "int8"})
    assert len(reply(odd, text(40))) == len(before)
    odd.check_integrity()
    with pytest.raises(ValueError, match="multiple of 4; here it is 18"):
        load(tmp_path, {"kv_dtype": "int4"})


@pytest.mark.parametrize("kv_dtype", CODED)
def test_codes_that_no_kernel_reads_are_decoded_and_the_path_says_so(tmp_path: Path, kv_dtype: str) -> None:
    """Step by step attention has no kernel for codes."""
    engine = load(save_model(tmp_path), {"kv_dtype": kv_dtype, "attention": "reference"})
    engine.submit(text(40), greedy(3))
    steps = [event for event in drain(engine) if isinstance(event, StepRecord)]
    assert len(steps) >= 3
    for step in steps:
        assert f"{kv_dtype} pages decoded before attention" in step.active_paths["kv"]
        assert "codes read as they are" not in step.active_paths["attention"]
    engine.close()
