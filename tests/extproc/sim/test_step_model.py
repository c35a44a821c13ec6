"""The duration of a step, against the figures its fit was checked with."""

import pytest

from extproc.sim.step_model import HARDWARE


def test_decoding_one_sequence_takes_7_ms_on_h100():
    """BLIS measures 6.9 ms for Llama-3.1-8B; common reports say 7 to 8."""
    assert HARDWARE["h100"].step_s(prefills=[], decode_contexts=[0]) == pytest.approx(
        0.0072, abs=5e-5
    )


def test_prefill_of_2048_tokens_takes_about_40_ms_on_h100():
    """The measured kernels add up to 34.6 ms of products and 2.9 ms of attention."""
    step_s = HARDWARE["h100"].step_s(prefills=[(2048, 0)], decode_contexts=[])

    assert step_s == pytest.approx(0.040, rel=0.02)


def test_h200_decodes_faster_but_prefills_alike():
    """More bandwidth helps what is bound by memory only."""
    h100, h200 = HARDWARE["h100"], HARDWARE["h200"]
    decode = {"prefills": [], "decode_contexts": [4000] * 32}
    prefill = {"prefills": [(8192, 0)], "decode_contexts": []}

    assert h200.step_s(**decode) < 0.85 * h100.step_s(**decode)
    assert h200.step_s(**prefill) == h100.step_s(**prefill)
    assert h200.kv_blocks > h100.kv_blocks


def test_every_term_counts():
    """A mixed step is the sum of the terms in the module's formula, worked out by hand."""
    step_s = HARDWARE["h100"].step_s(prefills=[(1000, 500)], decode_contexts=[2000, 3000])

    by_hand_ms = 1.2 + 0.018 * 1002 + 0.85e-6 * 1000 * 1000 + 4.3e-5 * 5000 + 0.0045 * 2
    assert step_s == pytest.approx(by_hand_ms / 1000)


def test_small_batches_cost_the_floor():
    """Streaming the weights bounds a batch of few tokens."""
    model = HARDWARE["h100"]

    one = model.step_s(prefills=[(1, 0)], decode_contexts=[])
    many = model.step_s(prefills=[(300, 0)], decode_contexts=[])

    assert one == pytest.approx(many, rel=0.01)


def test_an_empty_step_takes_no_time():
    """There is nothing to launch."""
    assert HARDWARE["h100"].step_s(prefills=[], decode_contexts=[]) == 0
