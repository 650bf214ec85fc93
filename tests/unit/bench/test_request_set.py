from itertools import islice

import pytest

from tritone_bench.prompts import PROMPTS
from tritone_bench.request_set import Ask, RequestSet
from tritone_client import InvalidRequest


def asked(*prompts, num_requests=4, first_seed=0, **options):
    return RequestSet("a test", tuple(Ask(prompt, options) for prompt in prompts), num_requests, first_seed)


def test_requests_go_round_and_have_seeds_of_their_own():
    requests = list(asked("a", "b", "c", first_seed=100))
    assert [ask.prompt for ask in requests] == ["a", "b", "c", "a"]
    assert [ask.options["seed"] for ask in requests] == [100, 101, 102, 103]


def test_a_seed_that_is_named_stays_and_none_is_left_out():
    [ask] = asked("a", num_requests=1, seed=7, speaker=None)
    assert ask.options == {"seed": 7}


def test_without_a_number_there_is_no_end():
    assert len(list(islice(asked("a", num_requests=None), 50))) == 50


def test_the_digest_is_of_what_is_asked():
    same = asked("a", "b", max_tokens=9).digest
    assert same == asked("a", "b", max_tokens=9, speaker=None).digest and len(same) == 16
    assert same == asked("a", "b", max_tokens=9, deadline_s=3.0, codec_chunk_frames=5).digest
    others = [
        asked("a", "c", max_tokens=9),
        asked("b", "a", max_tokens=9),
        asked("a", "b", max_tokens=8),
        asked("a", "b", max_tokens=9, first_seed=1),
        asked("a", "b", max_tokens=9, num_requests=5),
        asked("a", "b", max_tokens=9, num_requests=None),
        asked("a", "b", max_tokens=9, image=[b"png"]),
        asked("a", "b", max_tokens=9, image=[b"pnh"]),
    ]
    assert len({same, *(other.digest for other in others)}) == len(others) + 1


@pytest.mark.parametrize("wrong", [lambda: asked(), lambda: asked("a", num_requests=0), lambda: asked(None)])
def test_senseless_sets_are_refused(wrong):
    with pytest.raises(InvalidRequest):
        wrong()


def test_built_in_prompts_vary():
    assert len(set(PROMPTS)) == len(PROMPTS) >= 16
