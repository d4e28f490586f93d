"""Questions that only an Ascend 950 can answer, each of which decides something in this backend (docs/ascend.md, "Open questions").

    python -m deepinfer_backends.ascend950.tools.questions ANSWERS.json [--emulate]

Each runs a few small operators, compares with arithmetic in float64 on the host and writes one record: the question, what was seen, and
whether that is what the backend counts on ("as expected", "differs", "refused"). A device error may spoil what follows it in the same
process, so the hardware kit asks each in a process of its own (`--only N`).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from deepinfer_backends.ascend950 import codes


@dataclass(frozen=True)
class Answer:
    """What was seen. `verdict` is "as expected", "differs" or "refused"; `matters` says what to change if it is not the first."""

    question: str
    verdict: str
    seen: str
    matters: str


Question = Callable[[str], tuple[bool, str]]
"""Given the device: (as expected, what was seen)."""

_WORDS = 200  # of an error message

QUESTIONS: dict[str, tuple[Question, str]] = {}


def question(text: str, matters: str) -> Callable[[Question], Question]:
    def add(function: Question) -> Question:
        QUESTIONS[text] = (function, matters)
        return function

    return add


def ask(device: str, only: int | None = None) -> list[Answer]:
    """All answers, or that to question number `only`. A question whose operator raises is "refused", with the first line of the error."""
    answers = []
    for text, (function, matters) in list(QUESTIONS.items())[slice(None) if only is None else slice(only, only + 1)]:
        try:
            fine, seen = function(device)
            verdict = "as expected" if fine else "differs"
        except Exception as error:  # noqa: BLE001 the error is the answer
            verdict, seen = "refused", f"{type(error).__name__}: {str(error).strip()[:_WORDS]}"
        answers.append(Answer(text, verdict, seen, matters))
    return answers


def _normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _worst(got: Tensor, want: Tensor) -> float:
    """Largest difference, relative to the largest value."""
    return float((got.cpu().double() - want.double()).abs().max() / want.double().abs().max().clamp_min(1e-30))


@question("Are scale_alg 1, scale_alg 2, max_low_bound and the nibble order the model's?", "nothing works without them: update CANN")
def _scales(device: str) -> tuple[bool, str]:
    from deepinfer_backends.ascend950.arithmetic import wrong_rules

    wrong = wrong_rules(device)
    return not wrong, " ".join(wrong) or "yes"


@question("Does npu_rms_norm round a bf16 result once?", "if it does, kernels/linears.py may call it in bf16 and save two casts")
def _single_rounding(device: str) -> tuple[bool, str]:
    x, gamma = _normal(64, 5120).bfloat16(), _normal(5120, seed=1).bfloat16()
    f = x.double()
    want = (f * (f.square().mean(-1, keepdim=True) + 1e-20).rsqrt() * gamma.double()).bfloat16()
    got = torch.ops.npu.npu_rms_norm(x.to(device), gamma.to(device), 1e-20)[0].cpu()
    share = float((got != want).float().mean())
    return share < 0.01, f"{share:.2%} of the values differ from one rounding (two roundings: about 27 %)"


@question("Is a float32 product free of HF32?", "router, hyper-connections and head need it: look for another switch")
def _full_float32(device: str) -> tuple[bool, str]:
    a, b = _normal(64, 5120), _normal(64, 5120, seed=1)
    error = _worst(a.to(device) @ b.to(device).t(), a.double() @ b.double().t())
    return error < 1e-5, f"largest relative error {error:.1e} (HF32: about 1e-3)"


@question("Does npu_moe_gating_top_k know sqrt(softplus), as norm_type 2?", "then moe_gate can be one operator")
def _gate(device: str) -> tuple[bool, str]:
    logits, bias = _normal(32, 384), _normal(384, seed=1) * 0.1
    scores = torch.nn.functional.softplus(logits.double()).sqrt()
    want = (scores + bias).topk(6).indices.sort(-1).values
    options = {"k_group": 1, "group_count": 1, "renorm": 0, "norm_type": 2, "routed_scaling_factor": 1.5}
    weights, ids, _ = torch.ops.npu.npu_moe_gating_top_k(logits.to(device), 6, bias=bias.to(device), **options)
    order = ids.cpu().long().sort(-1)
    chosen = scores.gather(1, order.values)
    same = torch.equal(order.values, want)
    error = _worst(weights.cpu().gather(1, order.indices), chosen / chosen.sum(-1, keepdim=True) * 1.5)
    return same and error < 1e-5, f"same experts: {same}; largest weight error {error:.1e}"


@question("Is npu_swiglu_group_quant the model's SwiGLU, bit for bit?", "then the experts' SwiGLU can be one operator")
def _swiglu(device: str) -> tuple[bool, str]:
    from deepinfer_backends.ascend950.kernels import calls

    x, weight = (_normal(32, 4608) * 4).bfloat16(), _normal(32, seed=1).abs()
    options = {"quant_mode": 1, "dst_type": codes.FP8, "block_size": 32, "round_scale": True, "clamp_limit": 10.0}
    counts = torch.tensor([20, 12]).to(device)
    values, scales, _ = torch.ops.npu.npu_swiglu_group_quant(x.to(device), weight=weight.to(device), group_index=counts, **options)
    ours = calls.quantize_fp8((calls.clipped_swiglu(x.to(device).float(), 10.0) * weight.to(device)[:, None]).bfloat16())
    same = float((values.view(torch.uint8) == ours.values.view(torch.uint8)).float().mean())
    same_scales = bool((scales.view(torch.uint8).flatten() == ours.scales.flatten()).all())
    return same == 1.0 and same_scales, f"{same:.2%} of the values and {'all' if same_scales else 'not all'} scales equal"


@question("Does npu_transpose_quant_batchmatmul take e8m0 scales?", "an fp8 grouped output projection would become possible")
def _grouped_fp8(device: str) -> tuple[bool, str]:
    from deepinfer_backends.ascend950.kernels import calls

    x, w = calls.quantize_fp8(_normal(8, 2, 128).to(device)), calls.quantize_fp8(_normal(2, 64, 128, seed=1).to(device))
    got = torch.ops.npu.npu_transpose_quant_batchmatmul(
        x.values,
        w.values.transpose(1, 2).contiguous(),
        codes.BF16,
        x1_scale=x.scales.view(torch.float8_e8m0fnu),
        x2_scale=w.scales.transpose(1, 2).contiguous().view(torch.float8_e8m0fnu),
        group_sizes=[0, 0, 32],
        perm_x1=[1, 0, 2],
        perm_x2=[0, 1, 2],
        perm_y=[1, 0, 2],
    )
    left, right = calls.dequantize(x).cpu().double(), calls.dequantize(w).cpu().double()
    error = _worst(got, torch.einsum("tgk,gnk->tgn", left, right))
    return error < 1e-2, f"largest relative error {error:.1e}"


def _attend(device: str, columns: int, valid: int, **form: object) -> float:
    """Worst error of sparse attention over `valid` of `columns` keys with sinks, in the form given by extra arguments."""
    q, k = _normal(4, 1, 64, 512).bfloat16(), _normal(4, columns, 1, 512, seed=1).bfloat16()
    sinks = _normal(64, seed=2)
    index = torch.where(torch.arange(columns) < valid, torch.arange(columns), -1).int().expand(4, 1, 1, columns).contiguous()
    arguments = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in form.items()}
    value = arguments.pop("value", k.to(device))
    out = torch.ops.npu.npu_sparse_flash_attention(
        *(q.to(device), k.to(device), value, index.to(device), 512**-0.5), sparse_mode=0, sinks=sinks.to(device), **arguments
    )[0]
    scores = torch.einsum("bshd,bnd->bhn", q.double(), k[:, :valid, 0].double()) * 512**-0.5
    p = torch.cat((scores, sinks.double()[None, :, None].expand(4, -1, 1)), -1).softmax(-1)[..., :-1]
    return _worst(out[:, 0], torch.einsum("bhn,bnd->bhd", p, k[:, :valid, 0].double()))


def _zero_rope(columns: int) -> dict[str, object]:
    return {"attention_mode": 2, "query_rope": torch.zeros(4, 1, 64, 64).bfloat16(), "key_rope": torch.zeros(4, columns, 1, 64).bfloat16()}


@question("Sparse attention with sinks and zero rotary parts, 640 keys: right?", "the form in use; else append a key row for the sink")
def _attention(device: str) -> tuple[bool, str]:
    error = _attend(device, 640, 640, **_zero_rope(640))
    return error < 2e-2, f"largest relative error {error:.1e}"


@question("Sparse attention over 133 of 141 keys (no multiple of 16): right?", "else pad the key buffer")
def _odd_attention(device: str) -> tuple[bool, str]:
    error = _attend(device, 141, 133, **_zero_rope(141))
    return error < 2e-2, f"largest relative error {error:.1e}"


@question("Sparse attention without rotary parts: right?", "then 12 % of the score work can be saved")
def _plain_attention(device: str) -> tuple[bool, str]:
    error = _attend(device, 640, 640, attention_mode=0)
    return error < 2e-2, f"largest relative error {error:.1e}"


@question("Lightning indexer, 32 heads, key lengths 1 and 700: right?", "the form in use; else score with plain operators")
def _indexer(device: str) -> tuple[bool, str]:
    from deepinfer_backends.ascend950.kernels import calls

    q, k, w = _normal(2, 32, 128).bfloat16(), _normal(12, 64, 128, seed=1).bfloat16(), _normal(2, 32, seed=2).bfloat16()
    lengths, table = torch.tensor([1, 700], dtype=torch.int32), torch.arange(12, dtype=torch.int32).expand(2, -1).contiguous()
    found = calls.lightning_indexer(q.to(device), k.to(device), w.to(device), lengths.to(device), table.to(device), 512).cpu()
    scores = (torch.einsum("hd,nd->hn", q[1].double(), k.flatten(0, 1)[:700].double()).relu() * w[1].double()[:, None]).sum(0)
    best = set(scores.topk(512).indices.tolist())
    common = len(best & set(found[1].tolist()))
    fine = found[0, 0] == 0 and bool((found[0, 1:] == -1).all()) and common >= 508
    return bool(fine), f"length 1 gives {found[0, :2].tolist()}; {common} of 512 as in float64"


@question("Lightning indexer with key length 0: accepted?", "then rows that see nothing need no substitute length")
def _indexer_empty(device: str) -> tuple[bool, str]:
    from deepinfer_backends.ascend950.kernels import calls

    q, k, w = _normal(1, 32, 128).bfloat16(), _normal(12, 64, 128).bfloat16(), _normal(1, 32).bfloat16()
    lengths, table = torch.zeros(1, dtype=torch.int32), torch.arange(12, dtype=torch.int32)[None]
    found = calls.lightning_indexer(q.to(device), k.to(device), w.to(device), lengths.to(device), table.to(device), 512).cpu()
    return bool((found == -1).all()), f"gives {found[0, :4].tolist()}"


@question("Does npu_moe_token_unpermute take token-major places, in float32 order?", "then the experts' sum can be one operator")
def _unpermute(device: str) -> tuple[bool, str]:
    rows, places = _normal(12, 64).bfloat16(), torch.randperm(12, generator=torch.Generator().manual_seed(0)).int()
    ones = torch.ones(4, 3).bfloat16().to(device)
    got = torch.ops.npu.npu_moe_token_unpermute(rows.to(device), places.to(device), ones).cpu()
    want = rows[places.long()].view(4, 3, 64).float().sum(1).bfloat16()
    return torch.equal(got, want), f"largest relative error {_worst(got, want):.1e}"


@question("Do scatter and gather address a pool above 4 GiB?", "else the pool must be split")
def _large_pool(device: str) -> tuple[bool, str]:
    from deepinfer_backends.ascend950.kernels import calls

    width, rows = 528, (5 << 30) // 528 if device != "cpu" else 1000
    pool = torch.zeros(rows, width, dtype=torch.int8, device=device)
    at = torch.tensor([0, 1, rows - 1], device=device)
    calls.scatter_rows(pool, at, torch.full((3, width), 7, dtype=torch.int8, device=device))
    back = pool[at].cpu()
    return bool((back == 7).all()) and int(pool[2].sum()) == 0, f"{rows * width / 2**30:.1f} GiB; read back {back[:, 0].tolist()}"


@question("Do plain operators keep their promises (stable sort, lowest argmax, int64 xor and %, searchsorted, cast to e4m3)?", "see `seen`")
def _plain(device: str) -> tuple[bool, str]:
    ties = torch.tensor([[1.0, 3.0, 3.0, 2.0, 3.0]]).expand(1, -1)
    x, y = torch.tensor([0x1234567890ABCDE]), torch.tensor([0x0FEDCBA098765432])
    running, drawn = torch.tensor([[2**40, 2**41, 2**42]]), torch.tensor([[2**41]])
    tie = torch.tensor([1.0625, 1.1875, 0.0009765625 * 3])
    seen = {
        "stable sort": ties.to(device).sort(dim=1, descending=True, stable=True).indices.cpu().tolist() == [[1, 2, 4, 3, 0]],
        "lowest argmax": ties.to(device).argmax(-1).cpu().tolist() == [1],
        "int64 xor": (x.to(device) ^ y.to(device)).cpu().tolist() == (x ^ y).tolist(),
        "int64 remainder": (x.to(device) % 16000057).cpu().tolist() == (x % 16000057).tolist(),
        "searchsorted": torch.searchsorted(running.to(device), drawn.to(device), right=True).cpu().tolist() == [[2]],
        "cast to e4m3": tie.to(device).to(torch.float8_e4m3fn).cpu().view(torch.uint8).tolist()
        == tie.to(torch.float8_e4m3fn).view(torch.uint8).tolist(),
    }
    return all(seen.values()), ", ".join(f"{name}: {'yes' if fine else 'NO'}" for name, fine in seen.items())


@question("Does a captured graph of quantise, multiply and scatter replay with new inputs?", "else claim no graph_capture")
def _capture(device: str) -> tuple[bool, str]:
    from deepinfer_backends.ascend950.kernels import calls
    from deepinfer_backends.ascend950.runtime import AscendRuntime

    runtime = AscendRuntime(device)
    x, w = _normal(8, 128).to(device), calls.quantize_fp8(_normal(64, 128, seed=1).to(device))
    scales, out = w.scales.transpose(0, 1).contiguous(), torch.zeros(8, 64, device=device)
    rows = torch.arange(8, device=device)

    def work() -> None:
        calls.scatter_rows(out, rows, calls.linear_fp8(calls.quantize_fp8(x), w.values, scales).float())

    graph = runtime.capture(work)
    x.copy_(_normal(8, 128, seed=2).to(device))
    graph.replay()
    runtime.synchronize()
    replayed = out.cpu()
    work()
    return torch.equal(replayed, out.cpu()), "replay equals eager" if torch.equal(replayed, out.cpu()) else "replay differs from eager"


def main(arguments: list[str] | None = None) -> int:
    """Command line. Status 0 once all questions were asked, whatever the answers."""
    parser = argparse.ArgumentParser(prog="questions", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("answers", type=Path, help="file for the answers (JSON)")
    parser.add_argument("--emulate", action="store_true", help="ask the CPU emulation: a rehearsal that proves nothing about a device")
    parser.add_argument("--only", type=int, metavar="N", help=f"ask question N of 0 to {len(QUESTIONS) - 1}")
    options = parser.parse_args(arguments)
    from deepinfer_backends.ascend950.backend import AscendBackend

    backend = AscendBackend()
    chosen = backend.emulated() if options.emulate else backend
    chosen.kernels("")  # imports torch_npu with the switches of this backend, or says why not
    answers = ask("cpu" if options.emulate else "npu:0", options.only)
    record = {"backend": chosen.name, "answers": [asdict(answer) for answer in answers]}
    options.answers.write_text(json.dumps(record, indent=1))
    for answer in answers:
        print(f"{answer.verdict:12} {answer.question} {answer.seen}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
