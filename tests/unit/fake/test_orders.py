"""The language of the fake pipeline's prompts, and the plan that follows from one."""

import pytest

from tritone import deploy_reader
from tritone.deploy_reader import read_dataclass
from tritone.errors import ConfigError, InvalidRequest
from tritone.pipelines.fake import PIPELINE
from tritone.pipelines.fake.engines import PacedOptions
from tritone.pipelines.fake.orders import DEFAULT_WORDS, Fault, Orders
from tritone.pipelines.fake.signal import voice_of
from tritone.pipelines.fake.wave import WaveOptions
from tritone.request import read_request

DEPLOY = deploy_reader.from_mapping({"pipeline": "fake"}, "test")


def test_plain_words_are_said_as_they_are():
    orders = Orders.read("What is  the capital\nof Australia?")
    assert orders.text(voice=5) == "What is the capital of Australia?"
    assert orders.words == 6 and orders.num_frames == 18


def test_orders_may_stand_anywhere_and_are_not_said():
    orders = Orders.read("frames_per_word=2 hello pace_ms=5 singer_ms=6 wave_ms=7 world payload_bytes=9")
    assert orders.said == ("hello", "world") and orders.num_frames == 4 and orders.payload_bytes == 9
    assert orders.paces_ms == {"writer": 5, "singer": 6, "wave": 7}


def test_counted_words_name_their_request():
    assert Orders.read("words=3").text(voice=0xABC) == "000abc.0 000abc.1 000abc.2"
    assert Orders.read("").words == Orders.read("pace_ms=0").words == DEFAULT_WORDS


def test_a_fault_has_a_stage_and_a_place():
    orders = Orders.read("fail=singer@12 hang=wave kill=writer@0")
    assert orders.faults == {
        "singer": Fault("fail", 12),
        "wave": Fault("hang", 0),
        "writer": Fault("kill", 0),
    }
    assert orders.settings("singer") == {"fault": ["fail", 12]} and orders.settings("wave")["fault"][1] == 0


@pytest.mark.parametrize(
    ("prompt", "what"),
    [
        ("wrods=3", "unknown 'wrods'; did you mean 'words'?"),
        ("E=mc2", "unknown 'E'"),
        ("words=0", "words=0; give a whole number from 1"),
        ("words=many", "words=many; give a whole number"),
        ("pace_ms=-1", "pace_ms=-1; give"),
        ("words=5 hello", "words=5 and says 'hello'"),
        ("fail=singr@1", "unknown stage 'singr'; did you mean 'singer'?"),
        ("fail=singer@x", "fail=singer@x; write e.g."),
        ("fail=singer oom=singer", "two faults"),
        ("stall=wave", "hang=wave"),
        ("words=100000 frames_per_word=1000", "order at most"),
    ],
)
def test_a_wrong_order_is_one_sentence(prompt, what):
    with pytest.raises(InvalidRequest) as error:
        Orders.read(prompt)
    assert what in str(error.value)


def plan(prompt, **values):
    return PIPELINE.plan(read_request({"text_input": prompt, **values}, {}, DEPLOY, drawn_seed=41))


def test_the_plan_starts_the_writer_alone_for_text():
    assert set(plan("hello", modalities="text")) == {"writer"}
    calls = plan("hello kill=wave@3")
    assert set(calls) == {"writer", "singer", "wave"}
    assert calls["writer"].settings["voice"] == voice_of(41) and calls["writer"].settings["has_faults"]
    assert calls["wave"].settings == {"fault": ["kill", 3]}


def test_a_conversation_says_its_last_turn():
    messages = '[{"role": "user", "content": "no"}, {"role": "assistant", "content": "words=2"}]'
    request = read_request({"messages": messages}, {}, DEPLOY, drawn_seed=1)
    assert PIPELINE.plan(request)["writer"].settings["words"] == 2


@pytest.mark.parametrize("options", [PacedOptions, WaveOptions])
def test_a_deploy_file_may_order_a_fault_and_a_wrong_one_is_refused(options):
    assert read_dataclass(options, {"fault": "fail@12"}, "test").fault == "fail@12"
    for fault in ("fial@12", "fail@soon"):
        with pytest.raises(ConfigError, match="write one of"):
            read_dataclass(options, {"fault": fault}, "test")
