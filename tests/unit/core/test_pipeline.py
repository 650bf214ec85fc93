"""A pipeline that does not join never starts a server; routing follows the stages a request starts."""

import dataclasses

import pytest

from tritone import pipelines
from tritone.errors import ConfigError
from tritone.pipeline import Edge
from tritone.ports import Port
from tritone.routing import Routing

SMOLTALK = pipelines.get("smoltalk")
MODELS = {stage.name: f"smoltalk_{stage.name}" for stage in SMOLTALK.stages}


def changed(**changes):
    return dataclasses.replace(SMOLTALK, **changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"stages": (*SMOLTALK.stages, SMOLTALK.stages[0])}, ["repeat"]),
        ({"edges": (Edge("thinker.txt", "talker.text"),)}, ["thinker.txt", "thinker.text"]),
        ({"edges": (Edge("thinker.text", "talkr.text"),)}, ["talkr.text", "talker.text"]),
        ({"edges": (Edge("thinker.text", "thinker.messages"),)}, ["own stage"]),
        ({"edges": (Edge("thinker.text", "code2wav.frames"),)}, ["STRING", "FP32"]),
        ({"finals": {}}, ["modality"]),
        ({"finals": {"audio": "code2wav.wav"}}, ["code2wav.wav"]),
        ({"edges": SMOLTALK.edges[1:]}, ["ears", "feeds nothing"]),
    ],
    ids=["name", "source", "target", "self", "type", "no final", "unknown final", "useless"],
)
def test_a_graph_that_does_not_join_is_refused(changes, words):
    with pytest.raises(ConfigError) as refusal:
        changed(**changes)
    assert all(word in str(refusal.value) for word in words)


def test_a_cycle_is_refused():
    text = Port("text", "STRING", (1,), "")
    thinker, talker = SMOLTALK.stage("thinker"), SMOLTALK.stage("talker")
    loop = dataclasses.replace(talker, outputs=(text,), inputs=(dataclasses.replace(text, name="heard"),))
    back = dataclasses.replace(thinker, inputs=(dataclasses.replace(text, name="said"),))
    with pytest.raises(ConfigError, match="cycle"):
        changed(
            stages=(back, loop),
            edges=(Edge("thinker.text", "talker.heard"), Edge("talker.text", "thinker.said")),
            finals={"text": "thinker.text"},
        )


def test_text_among_what_triton_batches_is_refused():
    code2wav = SMOLTALK.stage("code2wav")
    speaks = dataclasses.replace(code2wav, inputs=(*code2wav.inputs, Port("speaker", "STRING", (1,), "")))
    with pytest.raises(ConfigError, match="takes text 'speaker' in batches; send it as UINT8"):
        changed(stages=(*(stage for stage in SMOLTALK.stages if stage.name != "code2wav"), speaks))


def test_consumers_are_opened_before_their_producers():
    order = [
        stage.name for stage in Routing(SMOLTALK, {"ears", "thinker", "talker", "code2wav"}, ()).open_order()
    ]
    assert order == ["talker", "thinker", "ears"]


def test_text_only_routes_leave_the_speech_side_out():
    routing = Routing(SMOLTALK, {"thinker"}, ("text",))
    (route,) = routing.routes(SMOLTALK.stage("thinker"), MODELS, {}, "inbox")
    assert (route.address, route.stage, set(route.ports)) == ("inbox", "", {"text", "num_tokens"})
    assert routing.num_sources("thinker") == 0 and routing.maker("audio") is None


def test_audio_only_sends_text_to_the_talker_and_none_to_the_client():
    routing = Routing(SMOLTALK, {"thinker", "talker", "code2wav"}, ("audio",))
    (route,) = routing.routes(SMOLTALK.stage("thinker"), MODELS, {"talker": "t"}, "inbox")
    assert (route.address, route.stage, route.ports) == ("t", "smoltalk_talker", {"text": "text"})
    (frames,) = routing.routes(SMOLTALK.stage("talker"), MODELS, {}, "inbox")
    assert (frames.stage, set(frames.ports)) == ("", {"frames", "segment_end"})
    assert routing.maker("audio") == "talker" and routing.num_sources("talker") == 1


def test_frames_wait_for_a_chunk_where_nothing_else_goes_with_them():
    omni = pipelines.get("qwen3_omni")
    models = {stage.name: f"qwen3_omni_{stage.name}" for stage in omni.stages}

    def sizes(pipeline, stage, modalities):
        routing = Routing(pipeline, {"thinker", "talker", "code2wav"}, modalities)
        endpoints = {"thinker": "e", "talker": "t"}
        names = models if pipeline is omni else MODELS
        return [
            r.frame_sizes for r in routing.routes(pipeline.stage(stage), names, endpoints, "inbox", (4, 25))
        ]

    assert sizes(omni, "talker", ("text", "audio")) == [(4, 25)]
    assert sizes(omni, "thinker", ("text", "audio")) == [(), ()]
    assert sizes(SMOLTALK, "talker", ("audio",)) == [()], "the end of a clause goes with its frames"


def test_unknown_names_come_with_the_known_ones():
    with pytest.raises(ConfigError, match="did you mean 'smoltalk'"):
        pipelines.get("smaltalk")
    with pytest.raises(ConfigError, match="did you mean 'thinker'"):
        SMOLTALK.stage("tinker")
