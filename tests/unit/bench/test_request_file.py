import json

import pytest

from tritone_bench.request_file import FIELDS, read_prompts, read_requests
from tritone_client import InvalidRequest


def written(tmp_path, *lines):
    path = tmp_path / "requests.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def test_a_line_is_a_request_and_what_it_leaves_out_comes_from_the_defaults(tmp_path):
    (tmp_path / "a.png").write_bytes(b"picture a")
    (tmp_path / "b.png").write_bytes(b"picture b")
    (tmp_path / "q.wav").write_bytes(b"sound")
    path = written(
        tmp_path,
        {"prompt": "one", "max_tokens": 64, "seed": 7, "speaker": "Ethan"},
        "",
        {"messages": [{"role": "user", "content": "two\u2028lines"}], "min_tokens": 3, "deadline_s": 2.5},
        {
            "prompt": "three",
            "image": ["a.png", "b.png"],
            "audio": "q.wav",
            "sampling": {"talker": {"top_k": 1}},
        },
    )
    one, two, three = read_requests(path, {"max_tokens": 9, "speaker": "Chelsie", "temperature": None})
    assert (one.prompt, one.options["max_tokens"], one.options["seed"]) == ("one", 64, 7)
    assert one.options["speaker"] == "Ethan" and two.options["speaker"] == "Chelsie"
    assert two.prompt is None and two.options["messages"] == [{"role": "user", "content": "two\u2028lines"}]
    assert two.options["sampling"] == {"max_tokens": 9, "min_tokens": 3} and two.options["deadline_s"] == 2.5
    assert three.options["image"] == [b"picture a", b"picture b"] and three.options["audio"] == [b"sound"]
    assert three.options["sampling"] == {"max_tokens": 9, "talker": {"top_k": 1}}


def test_the_sampling_of_a_line_wins_over_the_defaults(tmp_path):
    path = written(tmp_path, {"prompt": "a", "sampling": {"max_tokens": 5, "seed": 3}})
    [ask] = read_requests(path, {"max_tokens": 60, "sampling": {"min_tokens": 2}})
    assert ask.options == {"sampling": {"max_tokens": 5, "min_tokens": 2}, "seed": 3}


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ('{"prompt": "a"', "line 2 is not JSON"),
        ("[1]", 'line 2 is [1]; write an object, e.g. {"prompt": "Hello?"}'),
        ('{"promt": "a"}', "line 2 has an unknown field 'promt'; did you mean 'prompt'?"),
        ('{"prompt": "a", "xyzzy": 1}', "line 2 has an unknown field 'xyzzy'; the fields are prompt,"),
        ('{"prompt": ""}', 'line 2: prompt is ""; give some text'),
        ('{"prompt": 5}', "line 2: prompt is 5; give some text"),
        ('{"prompt": "a", "max_tokens": 0}', "line 2: max_tokens is 0; give a whole number from 1 on"),
        ('{"prompt": "a", "max_tokens": true}', "line 2: max_tokens is true; give a whole number from 1 on"),
        ('{"prompt": "a", "max_tokens": "9"}', 'line 2: max_tokens is "9"; give a whole number'),
        ('{"prompt": "a", "seed": -1}', "line 2: seed is -1; give a whole number from 0 on"),
        ('{"prompt": "a", "temperature": "hot"}', 'line 2: temperature is "hot"; give a number from 0 on'),
        ('{"prompt": "a", "deadline_s": 0}', "line 2: deadline_s is 0; give a positive number of seconds"),
        ('{"prompt": "a", "sampling": []}', "line 2: sampling is []; give an object"),
        ('{"messages": "a"}', 'line 2: messages is "a"; give a list of objects'),
        ('{"prompt": "a", "messages": [{"role": "user"}]}', "line 2: both prompt and messages"),
        ('{"speaker": "Ethan"}', "line 2: nothing is asked; give a prompt, messages, or media"),
        ('{"prompt": "a", "image": []}', "line 2: image is []; give a path, or a list of paths"),
        ('{"prompt": "a", "image": "no.png"}', "line 2: image is"),
        ('{"prompt": "' + "x" * 90 + '", "seed": "' + "y" * 90 + '"}', f'line 2: seed is "{"y" * 39}…; give'),
    ],
)  # fmt: skip
def test_a_bad_line_is_named_with_its_field_and_value(tmp_path, line, sentence):
    path = written(tmp_path, {"prompt": "good"}, line)
    with pytest.raises(InvalidRequest) as error:
        read_requests(path, {})
    assert f"{path} {sentence}" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("read", [read_requests, read_prompts])
def test_a_file_must_be_text_and_hold_something(tmp_path, read):
    path = tmp_path / "x"
    path.write_text("\n\n")
    with pytest.raises(InvalidRequest, match="holds no"):
        read(path, {})
    path.write_bytes(b'{"prompt": "caf\xe9"}')
    with pytest.raises(InvalidRequest, match=r"is not UTF-8 text \(byte 15\)"):
        read(path, {})
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "none", {})


def test_prompts_are_lines(tmp_path):
    path = tmp_path / "x"
    path.write_text("one\n\n  two \n")
    assert [ask.prompt for ask in read_prompts(path, {"max_tokens": 3})] == ["one", "two"]


def test_every_field_is_an_option_of_a_request():
    from tritone_client.request import RequestOptions

    assert set(FIELDS) - {"prompt", "min_tokens"} <= set(RequestOptions.__annotations__)
