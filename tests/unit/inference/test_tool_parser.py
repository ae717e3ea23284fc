import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ludic.inference import HermesToolParser, Llama3ToolParser, XMLToolParser


def calls(result):
    return [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in result.tool_calls or ()]


def hermes(text):
    return HermesToolParser().parse(text)


def test_hermes_blocks_become_calls_in_the_openai_shape():
    result = hermes('I will add.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>')
    assert result.tool_calls == [
        {"id": "call00000", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    ]
    assert result.content == "I will add." and not result.parse_error


@pytest.mark.parametrize(
    ("text", "found", "is_broken", "content"),
    [
        ('a<tool_call>{"name":"f","arguments":{}}</tool_call>b<tool_call>{"name":"g"}</tool_call>c',
         [("f", {}), ("g", {})], False, "abc"),
        ("just text", [], False, "just text"),
        ('<tool_call>{"name": </tool_call><tool_call>{"name":"g","arguments":{}}</tool_call>', [("g", {})], True, None),
        ('<tool_call>[{"name":"f"},{"name":"g","arguments":{"x":2}}]</tool_call>', [("f", {}), ("g", {"x": 2})], False, None),
        ('<tool_call>{"name": "f", "arguments": {}}', [], True, None),
        ('<tool_call>{"name": <tool_call>{"name":"g"}</tool_call>', [("g", {})], True, None),
        ('<tool_call>{"name":"f","arguments":"{\\"a\\": 1}"}</tool_call>', [("f", {"a": 1})], False, None),
        ('<tool_call>{"name":"f","arguments":{"code":"a\nb 🎲"}}</tool_call>', [("f", {"code": "a\nb 🎲"})], False, None),
    ],
    ids=["several", "none", "one broken", "a list", "unclosed", "nested", "encoded twice", "raw newlines"],
)  # fmt: skip
def test_hermes_reads_what_can_be_read(text, found, is_broken, content):
    result = hermes(text)
    assert calls(result) == found and bool(result.parse_error) == is_broken
    assert content is None or result.content == content
    assert [c["id"] for c in result.tool_calls or ()] == [f"call{n:05d}" for n in range(len(found))]


@pytest.mark.parametrize("body", ["[1, 2]", '"text"', "3", "null", "{}", '{"name": ""}', '{"name": 3}',
                                  '{"name": "f", "arguments": "not json"}', '{"name": "f", "arguments": [1]}'])  # fmt: skip
def test_json_that_is_not_a_call_is_a_parse_error_and_never_an_exception(body):
    result = hermes(f"<tool_call>{body}</tool_call>")
    assert result.parse_error and result.tool_calls is None


@pytest.mark.parametrize("end", ["}}", "}}}"], ids=["doubled at the start", "doubled on both sides"])
def test_doubled_braces_as_qwen_coder_copies_them_from_its_template(end):
    result = hermes(f'<tool_call>\n{{{{"name": "f", "arguments": {{"a": "{{1}}"{end}\n</tool_call>')
    assert calls(result) == [("f", {"a": "{1}"})] and not result.parse_error
    assert hermes('<tool_call>{{"name": "f"}}}</tool_call>').parse_error


def llama(text):
    return Llama3ToolParser().parse(text)


def test_llama3_reads_a_reply_that_is_a_call():
    assert calls(llama('{"name": "f", "parameters": {"a": 1}}')) == [("f", {"a": 1})]
    assert calls(llama('{"type": "function", "name": "f", "parameters": {}}')) == [("f", {})]
    assert calls(llama('sure <|python_tag|>{"name":"f","parameters":{}};{"name":"g"}')) == [("f", {}), ("g", {})]
    assert llama('sure <|python_tag|>{"name":"f","parameters":{}}').content == "sure"


@pytest.mark.parametrize("text", ["A1", '{"move": "A1"}', "", "text {not a call}"])
def test_llama3_leaves_other_text_alone(text):
    result = llama(text)
    assert result.tool_calls is None and not result.parse_error and result.content == text


def test_llama3_says_when_a_call_is_broken():
    assert llama('{"name": "f", "parameters": {').parse_error
    assert llama("<|python_tag|>print(1)").parse_error


def xml(text):
    return XMLToolParser().parse(text)


def test_xml_reads_both_spellings():
    qwen = "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=b>x y</parameter>\n</function>\n</tool_call>"
    assert calls(xml(f"so: {qwen}")) == [("f", {"a": "1", "b": "x y"})] and xml(f"so: {qwen}").content == "so:"
    invoke = '<invoke name="f"><parameter name="a">[1, 2]</parameter></invoke>'
    assert calls(xml(invoke)) == [("f", {"a": "[1, 2]"})]
    named = xml(f"so: <minimax:tool_call>\n{invoke}\n</minimax:tool_call>")
    assert calls(named) == [("f", {"a": "[1, 2]"})] and named.content == "so:"


@pytest.mark.parametrize(
    "text", ["<function=f>", "<function=f><parameter=a>1</function>", "<parameter=a>1</parameter>"]
)
def test_xml_says_when_a_call_is_broken(text):
    assert xml(text).parse_error


def test_xml_leaves_other_text_alone():
    assert xml("a < b and <b>bold</b>").tool_calls is None


@given(st.text(alphabet='<>/{}[]":,abtool_calnme=f123 \n|', max_size=80))
def test_no_text_makes_a_parser_raise(text):
    for parser in (HermesToolParser(), Llama3ToolParser(), XMLToolParser()):
        for wrapped in (text, f"<tool_call>{text}</tool_call>", f'{{"name": {text}', f"<function={text}</function>"):
            result = parser.parse(wrapped)
            assert result.tool_calls is None or all(
                json.loads(c["function"]["arguments"]) is not None for c in result.tool_calls
            )


def test_hostile_text_neither_recurses_nor_takes_long():
    deep = "[" * 5000
    assert hermes(f"<tool_call>{deep}</tool_call>").parse_error
    assert llama('{"name": ' + deep).parse_error
    assert xml("<function=a>" * 20_000).parse_error
    assert xml("<function=a>" + "<parameter=b>" * 20_000 + "</function>").parse_error


def test_lone_surrogates_do_not_travel():
    (call,) = hermes('<tool_call>{"name": "f", "arguments": {"x": "\\ud800"}}</tool_call>').tool_calls
    json.dumps(call, ensure_ascii=False).encode("utf-8")
