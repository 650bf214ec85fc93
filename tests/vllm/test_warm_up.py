"""What vLLM compiles in a step is compiled before the first session."""

from __future__ import annotations

import pytest

from thinkers import CASES, assert_equal
from tritone.engines.vllm.warm_up import DRAWS, SEEDS, step_sizes, warm_up


@pytest.fixture
def scheduled(tight, monkeypatch):
    """Rows of each step, and how many sessions had them."""
    steps, schedule = [], tight.engine._scheduler.schedule

    def noted(*given, **named):
        output = schedule(*given, **named)
        steps.append((output.total_num_scheduled_tokens, len(output.num_scheduled_tokens)))
        return output

    monkeypatch.setattr(tight.engine._scheduler, "schedule", noted)
    return steps


def test_sizes_are_those_at_which_kernels_change():
    assert step_sizes(1) == [1]
    assert step_sizes(20) == [*range(1, 11), 12, 13, 14, 16, 17, 18]
    assert {96, 97, 98, 128, 129, 130, 4096} <= set(step_sizes(4096))
    assert max(step_sizes(4096)) == 4096


def test_steps_of_all_sizes_run_and_leave_nothing_behind(tight, expected, scheduled):
    tight.engine._warm_up()
    tight.engine.check_integrity()
    whole = [rows for rows, sessions in scheduled if sessions == 1]
    assert set(step_sizes(16)) <= set(whole)
    steps = 2  # of four sessions at a time: a prompt of one row, and a token
    assert scheduled.count((4, 4)) == steps * len(SEEDS) * len(DRAWS)
    name = next(iter(CASES))
    assert_equal(tight.one(name, CASES[name]), expected[name])


def test_every_draw_has_a_seed_as_those_of_sessions_have(tight):
    engine, asked = tight.engine, []

    def noted(**settings):
        asked.append(settings)
        return engine._params(**settings)

    warm_up(engine._llm, noted, most_rows=16, most_sessions=4, context=64)
    for draw in DRAWS:
        seeds = {
            given["seed"] for given in asked if given["max_tokens"] == 2 and draw.items() <= given.items()
        }
        assert seeds == set(SEEDS) and None in seeds and len(seeds) == 2, draw


def test_a_step_has_more_rows_than_a_context(tight, scheduled):
    engine = tight.engine
    warm_up(engine._llm, engine._params, most_rows=16, most_sessions=4, context=5)
    assert (16, 4) in scheduled
    engine.check_integrity()
