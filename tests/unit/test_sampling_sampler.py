"""The sampler: order of edits, forced tokens, log-probabilities, failed rows, verification and drafting."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from deepinfer_backends.cpu_ref.kernels import ReferenceKernels
from deepinfer_core.sampling import (
    RequestRows,
    Sampled,
    Sampler,
    SamplerOptions,
    SamplingParams,
    SamplingState,
    Verified,
    pack_device,
    unpack_host,
)

VOCAB, EOS = 40, 1
KERNELS = ReferenceKernels(torch.device("cpu"))


def sampler(**options: Any) -> Sampler:
    return Sampler(KERNELS, VOCAB, SamplerOptions(**options))


def state(prompt: tuple[int, ...] = (), output: tuple[int, ...] = (), seed: int = 7, compat: bool = False, **params: Any) -> SamplingState:
    made = SamplingState(SamplingParams(**{"max_tokens": 1000, **params}), seed, prompt, (EOS,), compat)
    made.append(output)
    return made


def sample(logits: Tensor, *states: SamplingState, **options: Any) -> Sampled:
    unit = sampler(**options)
    before = logits.clone()
    result = unit.sample(logits, unit.prepare([RequestRows(s, 10 + i) for i, s in enumerate(states)]))
    assert torch.equal(logits.nan_to_num(5), before.nan_to_num(5)), "the logits were modified"
    return result


def line(**peaks: float) -> Tensor:
    """Logits [1, V]: -5 everywhere, and `t3=2.0` at token 3."""
    logits = torch.full((1, VOCAB), -5.0)
    for name, value in peaks.items():
        logits[0, int(name[1:])] = value
    return logits


def test_greedy_takes_the_lowest_argmax_and_scores_at_temperature_one() -> None:
    logits = line(t3=2.0, t9=2.0, t4=1.0)
    got = sample(logits, state(temperature=0))
    assert got.tokens.tolist() == [3]
    assert got.scores.tokens.item() == pytest.approx(torch.log_softmax(logits, -1)[0, 3].item())


def test_greedy_compat_samples_at_a_tiny_temperature() -> None:
    logits = line(t3=2.0, t9=2.0)
    drawn = {sample(logits, state(temperature=0, compat=True, seed=seed)).tokens.item() for seed in range(40)}
    assert drawn == {3, 9}, "exact ties go to the random stream"
    assert sample(line(t3=2.0, t9=1.9), state(temperature=0, compat=True)).tokens.tolist() == [3]


def test_mixed_batch_equals_each_request_alone() -> None:
    torch.manual_seed(3)
    states = [
        state(temperature=0),
        state(temperature=0.7, seed=1),
        state(temperature=1.3, top_k=5, seed=2),
        state(temperature=0.9, top_p=0.8, seed=3, top_logprobs=4),
        state(temperature=0, repetition_penalty=1.5, prompt=(1, 2, 3), output=(4, 5, 5)),
        state(min_p=0.1, seed=5, logit_bias={3: 4.0}),
        state(temperature=0, golden_token_ids=[17]),
        state(min_tokens=3, seed=8, presence_penalty=1.0, output=(9,)),
    ]
    logits = torch.randn(len(states), VOCAB) * 3
    together = sample(logits, *states, blacklist=(0, 39))
    for i, alone_state in enumerate(states):
        unit = sampler(blacklist=(0, 39))
        alone = unit.sample(logits[i : i + 1], unit.prepare([RequestRows(alone_state, 10 + i)]))
        assert alone.tokens.item() == together.tokens[i].item()
        assert torch.equal(alone.scores.tokens, together.scores.tokens[i : i + 1])
    assert together.tokens[6] == 17
    assert together.scores.top_ids is not None
    assert together.scores.top_ids.shape == (8, 4)


def expected_logits(logits: list[float], prompt: list[int], output: list[int], params: SamplingParams) -> list[float]:
    """Penalties and bias in plain Python."""
    result = []
    for token, value in enumerate(logits):
        x = value
        if token in prompt or token in output:
            x = x / params.repetition_penalty if x > 0 else x * params.repetition_penalty
        x -= params.frequency_penalty * output.count(token) + params.presence_penalty * (token in output)
        result.append(x + params.logit_bias.get(token, 0.0))
    return result


def test_penalties_and_bias_follow_their_definition() -> None:
    torch.manual_seed(1)
    logits = torch.randn(1, VOCAB) * 3
    prompt, output = (2, 3, 4, 4), (3, 8, 8, 8, 20)
    made = state(
        prompt,
        output,
        temperature=0,
        repetition_penalty=1.3,
        presence_penalty=0.7,
        frequency_penalty=-0.4,
        logit_bias={8: 1.5, 30: -2.0},
        top_logprobs=VOCAB,
    )
    got = sample(logits, made)
    want = torch.log_softmax(torch.tensor(expected_logits(logits[0].tolist(), list(prompt), list(output), made.params)), -1)
    assert got.scores.top is not None
    assert got.scores.top_ids is not None
    assert torch.allclose(got.scores.top[0], want[got.scores.top_ids[0]], atol=1e-5)
    assert got.tokens.item() == int(want.argmax())


def test_bias_cannot_bring_a_forbidden_id_back() -> None:
    logits = line(t1=50.0, t3=2.0, t4=1.0, t5=0.5)
    blacklisted = sample(logits, state(temperature=0, logit_bias={3: 100.0, 1: -100.0}), blacklist=(3,))
    assert blacklisted.tokens.tolist() == [4]
    early = sample(logits, state(temperature=0, min_tokens=1, logit_bias={EOS: 100.0}))
    assert early.tokens.tolist() == [3]


def test_min_tokens_holds_back_eos_and_stop_tokens() -> None:
    logits = line(t1=9.0, t6=8.0, t3=2.0)
    params: dict[str, Any] = {"temperature": 0, "min_tokens": 2, "stop_token_ids": [6]}
    assert sample(logits, state(**params)).tokens.tolist() == [3]
    assert sample(logits, state(output=(5,), **params)).tokens.tolist() == [3]
    assert sample(logits, state(output=(5, 5), **params)).tokens.tolist() == [1]


def test_first_token_no_eos_acts_once_and_only_for_the_value_one() -> None:
    logits = line(t1=9.0, t3=2.0)
    assert sample(logits, state(temperature=0, first_n_token_no_eos=1)).tokens.tolist() == [3]
    assert sample(logits, state(temperature=0, first_n_token_no_eos=1, output=(5,))).tokens.tolist() == [1]
    assert sample(logits, state(temperature=0, first_n_token_no_eos=2)).tokens.tolist() == [1]


def test_grammar_mask() -> None:
    mask = np.zeros((1, 2), np.int32)
    mask[0, 0] = 1 << 4 | 1 << 9
    unit = sampler()
    got = unit.sample(line(t3=5.0, t9=1.0), unit.prepare([RequestRows(state(temperature=0), 3, mask=mask)]))
    assert got.tokens.tolist() == [9]


def test_golden_tokens_are_forced_with_their_own_log_probability() -> None:
    logits = line(t3=5.0, t9=1.0)
    made = state(golden_token_ids=[9, 4], temperature=0)
    got = sample(logits, made)
    assert got.tokens.tolist() == [9]
    assert got.scores.tokens.item() == pytest.approx(torch.log_softmax(logits, -1)[0, 9].item())
    made.append([9, 4])
    assert sample(logits, made).tokens.tolist() == [3], "free after the last golden token"


def test_force_topk() -> None:
    logits = line(t3=1.0, t9=1.0, t4=1.0, t5=0.9)
    got = sample(logits, state(temperature=0, top_logprobs=4), force_topk=2)
    assert got.scores.top_ids is not None
    assert got.scores.top is not None
    assert sorted(got.scores.top_ids[0, :2].tolist()) == [3, 4]
    assert got.scores.top[0].tolist() == pytest.approx([math.log(0.5)] * 2 + [-9999.0] * 2)


def test_top_lists_are_sorted_ties_by_lower_id_and_consistent() -> None:
    logits = line(t7=1.0, t3=1.0, t9=2.0)
    got = sample(logits, state(temperature=0.5, top_logprobs=5))
    assert got.scores.top_ids is not None
    assert got.scores.top is not None
    assert got.scores.top_ids[0].tolist() == [9, 3, 7, 0, 1]
    want = torch.log_softmax(logits / 0.5, -1)[0]
    assert torch.allclose(got.scores.top[0], want[[9, 3, 7, 0, 1]], atol=1e-6)
    assert got.scores.tokens.item() == pytest.approx(want[got.tokens.item()].item(), abs=1e-6)


def test_processed_log_probabilities_are_floored_and_raw_ones_are_untouched() -> None:
    logits = line(t3=5.0, t9=4.0)
    made = state(temperature=0.5, top_k=1, logit_bias={9: 9.0}, top_logprobs=2)
    processed = sample(logits, made)
    assert processed.tokens.tolist() == [9]
    assert processed.scores.top is not None
    assert processed.scores.top[0].tolist() == [0.0, -9999.0]
    raw = sample(logits, made, logprobs_mode="raw")
    want = torch.log_softmax(logits, -1)[0]
    assert raw.scores.top_ids is not None
    assert raw.scores.top is not None
    assert raw.scores.top_ids[0].tolist() == [3, 9]
    assert raw.scores.top[0].tolist() == pytest.approx(want[[3, 9]].tolist())
    assert raw.scores.tokens.item() == pytest.approx(want[9].item())


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_with_non_finite_logits_fails_alone(bad: float) -> None:
    logits = torch.randn(3, VOCAB)
    logits[1, 5] = bad
    states = [state(temperature=0), state(seed=3), state(seed=4, top_p=0.9)]
    got = sample(logits, *states)
    assert got.failed.tolist() == [False, True, False]
    assert 0 <= got.tokens[1] < VOCAB
    clean = sample(torch.where(torch.tensor([[True], [False], [True]]), logits, 0.0), *states)
    assert got.tokens[[0, 2]].tolist() == clean.tokens[[0, 2]].tolist()


def test_a_row_without_any_possible_id_fails() -> None:
    logits = torch.randn(2, VOCAB)
    logits[0] = -math.inf
    assert sample(logits, state(), state()).failed.tolist() == [True, False]
    unit = sampler()
    nothing = RequestRows(state(temperature=0), 3, mask=np.zeros((1, 2), np.int32))
    assert unit.sample(torch.randn(1, VOCAB), unit.prepare([nothing])).failed.tolist() == [True]


def test_positions_and_seeds_select_the_numbers() -> None:
    logits = torch.zeros(1, VOCAB)
    unit = sampler()

    def token(seed: int, position: int) -> int:
        return unit.sample(logits, unit.prepare([RequestRows(state(seed=seed), position)])).tokens.item()

    assert [token(5, p) for p in range(20)] == [token(5, p) for p in range(20)]
    assert [token(5, p) for p in range(20)] != [token(6, p) for p in range(20)]
    assert len({token(5, p) for p in range(20)}) > 5


def test_positions_known_only_on_the_device_can_replace_the_hosts() -> None:
    logits = torch.zeros(2, VOCAB)
    unit = sampler()
    late = unit.prepare([RequestRows(state(seed=1), 0), RequestRows(state(seed=2), 0)])
    known = unit.prepare([RequestRows(state(seed=1), 31), RequestRows(state(seed=2), 77)])
    late = dataclasses.replace(late, base=torch.tensor([31, 77]))
    assert torch.equal(unit.sample(logits, late).tokens, unit.sample(logits, known).tokens)


def verify(
    logits: Tensor, drafts: list[int], requests: list[RequestRows], draft_log_probs: Tensor | None = None, **options: Any
) -> Verified:
    unit = sampler(**options)
    if draft_log_probs is None:
        draft_log_probs = torch.full_like(logits, -math.log(VOCAB))
    return unit.verify(logits, unit.prepare(requests), torch.tensor(drafts), draft_log_probs)


def peaks(*tokens: int) -> Tensor:
    return torch.cat([line(**{f"t{token}": 9.0}) for token in tokens])


def test_greedy_verification_emits_the_accepted_prefix_and_the_next_token() -> None:
    requests = [
        RequestRows(state(temperature=0), 5, drafts=3),
        RequestRows(state(temperature=0), 9),
        RequestRows(state(temperature=0), 7, 1),
    ]
    got = verify(peaks(3, 4, 5, 6, 7, 8, 9), [3, 4, 0, -1, -1, 8, -1], requests)
    assert got.accepted.tolist() == [2, 0, 1]
    assert got.tokens.tolist() == [5, 7, 9]
    assert got.emitted.tolist() == [3, 4, 5, -1, 7, 8, 9]
    assert got.estimate.tolist() == pytest.approx([0.99995, 0.99995, 0, 0, 0, 0.99995, 0], abs=1e-5)
    mixed = [*requests[:2], RequestRows(state(temperature=1.0), 7, 1)]
    again = verify(peaks(3, 4, 5, 6, 7, 8, 9), [3, 4, 0, -1, -1, 8, -1], mixed)
    assert again.accepted[:2].tolist() == [2, 0]
    assert again.emitted[:5].tolist() == [3, 4, 5, -1, 7]
    assert torch.equal(got.scores.tokens[:3], again.scores.tokens[:3])


def test_a_draft_after_a_rejected_one_is_ignored() -> None:
    got = verify(peaks(3, 4, 5), [0, 4, -1], [RequestRows(state(temperature=0), 5, drafts=2)])
    assert got.emitted.tolist() == [3, -1, -1]
    assert got.accepted.tolist() == [0]


def test_missing_drafts_are_rejected_and_the_first_row_gives_the_token() -> None:
    got = verify(peaks(3, 4, 5), [-1, -1, -1], [RequestRows(state(temperature=0.8), 5, drafts=2)])
    assert got.emitted.tolist() == [3, -1, -1]
    plain = sample(peaks(3), state(temperature=0.8))
    assert got.tokens.tolist() == plain.tokens.tolist()


def test_penalties_of_a_row_count_the_drafts_before_it() -> None:
    logits = line(t3=5.0, t4=4.5).repeat(3, 1)
    made = state(temperature=0, presence_penalty=1.0)
    got = verify(logits, [3, 4, -1], [RequestRows(made, 5, drafts=2)])
    # Row 0 takes 3; with 3 in the output row 1 takes 4; with both present row 2 takes 3 again.
    assert got.emitted.tolist() == [3, 4, 3]
    one_by_one = state(temperature=0, presence_penalty=1.0)
    for want in (3, 4, 3):
        token = sample(logits[:1], one_by_one).tokens.item()
        assert token == want
        one_by_one.append([token])


def test_min_tokens_is_counted_per_row() -> None:
    logits = line(t1=9.0, t3=5.0).repeat(3, 1)
    got = verify(logits, [3, 3, -1], [RequestRows(state(temperature=0, min_tokens=3, output=(5,)), 5, drafts=2)])
    assert got.emitted.tolist() == [3, 3, 1]


def test_golden_tokens_decide_acceptance() -> None:
    made = state(golden_token_ids=[8, 3, 9, 20], output=(8,))
    got = verify(peaks(5, 5, 5, 5), [3, 9, 11, -1], [RequestRows(made, 5, drafts=3)])
    assert got.emitted.tolist() == [3, 9, 20, -1]
    assert got.accepted.tolist() == [2]


def test_grammar_masks_of_verify_rows() -> None:
    mask = np.full((2, 2), -1, np.int32)
    mask[1, 0] = 1 << 6
    got = verify(peaks(3, 4), [3, -1], [RequestRows(state(temperature=0), 5, drafts=1, mask=mask)])
    assert got.emitted.tolist() == [3, 6]


def test_only_rows_up_to_the_final_token_can_fail_a_request() -> None:
    logits = peaks(3, 4, 5, 6)
    logits[2, 0] = math.nan
    requests = [RequestRows(state(temperature=0), 5, drafts=2), RequestRows(state(temperature=0), 5)]
    assert verify(logits, [0, 4, -1, -1], requests).failed.tolist() == [False, False], "the poisoned row belongs to a rejected draft"
    assert verify(logits, [3, 4, -1, -1], requests).failed.tolist() == [True, False]


def test_verify_rows_use_the_stride_or_the_token_index() -> None:
    logits, none = torch.zeros(3, VOCAB), torch.zeros(3, VOCAB)
    request = RequestRows(state(golden_token_ids=None, seed=11), 100, drafts=2)
    for option, step in (("row", 10000019), ("token_index", 1)):
        unit = sampler(deterministic_rng=option)
        batch = unit.prepare([request])
        assert batch.random().positions.tolist() == [100, 100 + step, 100 + 2 * step]
        assert unit.verify(logits, batch, torch.tensor([-1, -1, -1]), none).accepted.tolist() == [0]


def test_drafts_use_their_own_stream_at_the_index_of_the_drafted_token() -> None:
    unit = sampler()
    made = state(seed=42, temperature=0.9)
    logits = torch.zeros(1, VOCAB)
    batch = unit.prepare([RequestRows(made, 98)])
    tokens, log_probs = unit.draft(logits, batch, 1, torch.tensor([2]))
    assert log_probs[0, 0].item() == pytest.approx(-math.log(VOCAB), abs=1e-6)
    other = unit.prepare([RequestRows(state(seed=42 + 1000000007), 101)])
    assert tokens.tolist() == unit.sample(logits, other).tokens.tolist()


def test_greedy_drafts_are_the_argmax_with_a_one_hot_distribution() -> None:
    unit = sampler()
    tokens, log_probs = unit.draft(peaks(4), unit.prepare([RequestRows(state(temperature=0), 9)]), 1, torch.tensor([0]))
    assert tokens.tolist() == [4]
    assert log_probs.exp().sum().item() == 1


@pytest.mark.parametrize("count", [0, 1, 600])
def test_prompt_scores(count: int) -> None:
    unit = sampler(blacklist=(3,))
    logits, targets = torch.randn(count, VOCAB), torch.randint(0, VOCAB, (count,))
    got = unit.prompt_scores(logits, targets, SamplingParams(temperature=0.5, top_logprobs=2))
    want = torch.log_softmax(logits / 0.5, -1)
    assert torch.allclose(got.tokens, want.gather(1, targets[:, None])[:, 0], atol=1e-5)
    assert got.top is not None
    assert got.top.shape == (count, 2)
    split = [unit.prompt_scores(logits[i : i + 7], targets[i : i + 7], SamplingParams(temperature=0.5)).tokens for i in range(0, count, 7)]
    assert torch.equal(torch.cat(split) if split else got.tokens, got.tokens)
    greedy = unit.prompt_scores(logits, targets, SamplingParams(temperature=0, top_k=1))
    assert torch.allclose(greedy.tokens, torch.log_softmax(logits, -1).gather(1, targets[:, None])[:, 0], atol=1e-5)


def test_prompt_scores_of_removed_tokens_are_floored() -> None:
    got = sampler().prompt_scores(line(t3=5.0), torch.tensor([4]), SamplingParams(top_k=1))
    assert got.tokens.tolist() == [-9999.0]


def test_history_is_needed_only_by_requests_that_look_back() -> None:
    assert not state(temperature=0.7, logit_bias={3: 1.0}).needs_history
    assert state(presence_penalty=0.1).needs_history
    assert state(min_tokens=2, output=(5,)).needs_history
    assert not state(min_tokens=2, output=(5, 6)).needs_history
    assert state(golden_token_ids=[4]).needs_history
    assert not state(golden_token_ids=[4], output=(4,)).needs_history
    assert state(first_n_token_no_eos=1).needs_history


def test_results_travel_in_one_buffer() -> None:
    tensors = [torch.tensor([1, 2**40]), torch.tensor([0.5, -1.0, 3.0]), torch.tensor([True]), torch.zeros(0, 3), torch.tensor([[7, 8]])]
    back = unpack_host(pack_device(tensors).numpy(), tensors)
    for tensor, array in zip(tensors, back, strict=True):
        assert np.array_equal(tensor.numpy(), array)
        assert tuple(tensor.shape) == array.shape


def test_one_upload_per_step() -> None:
    uploads = []

    def upload(buffer: np.ndarray) -> Tensor:
        uploads.append(buffer.dtype)
        return torch.from_numpy(buffer)

    states = [state(logit_bias={1: 1.0}), state((1, 2), (3,), repetition_penalty=1.2, min_tokens=5), state(golden_token_ids=[1])]
    sampler().prepare([RequestRows(s, 4, drafts=2, mask=np.full((3, 2), -1, np.int32)) for s in states], upload)
    assert uploads == [np.uint8]


def test_no_requests() -> None:
    unit = sampler()
    got = unit.sample(torch.zeros(0, VOCAB), unit.prepare([]))
    assert got.tokens.shape == (0,)
    assert got.failed.shape == (0,)
