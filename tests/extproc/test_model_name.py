"""Which model a request asks for: in JSON, in forms as clients write them, in the query string."""

from __future__ import annotations

import io
from typing import Any

import aiohttp
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.model_name import (
    MAX_BOUNDARIES,
    MAX_FORM_MODEL_BYTES,
    MAX_PART_HEADERS_BYTES,
    model_name,
)

FILE = b'Content-Disposition: form-data; name="file"; filename="a.wav"\r\nContent-Type: audio/wav'
FIELD = b'Content-Disposition: form-data; name="model"'
UPLOADS = "/v1/audio/transcriptions"


def form(*parts, boundary=b"b0"):
    """Return a form of *parts*, which are headers and a value."""
    text = b"".join(b"--%b\r\n%b\r\n\r\n%b\r\n" % (boundary, *part) for part in parts)
    return text + b"--" + boundary + b"--\r\n"


def in_form(body, content_type="multipart/form-data; boundary=b0"):
    """Return the model of the form *body*."""
    return model_name({"content-type": content_type}, UPLOADS, body, "")


# The order of the places


@pytest.mark.parametrize(
    ("content", "body", "path", "model"),
    [
        ("json", form((FIELD, b"form")), "/x?model=query", "json"),
        ("", form((FIELD, b"form")), "/x?model=query", "form"),
        ("", form((FILE, b"...")), "/x?model=query", "query"),
        ("", b"", "/x?model=query", "query"),
        ("", None, "/x?model=query", "query"),
        ("", None, "/x", ""),
    ],
)
def test_body_goes_before_query(content, body, path, model):
    """JSON first, then a form, then the query string, then nothing."""
    headers = {"content-type": "multipart/form-data; boundary=b0"}

    assert model_name(headers, path, body, content) == model


def test_request_without_headers_or_body_asks_for_nothing():
    """As a health check does."""
    assert model_name({}, "/health", None, "") == ""


# Query strings


@pytest.mark.parametrize(
    ("path", "model"),
    [
        ("/v1/realtime?model=gpt-realtime", "gpt-realtime"),
        ("/v1/realtime?intent=x&model=a&y=1", "a"),
        ("/v1/realtime?model=meta-llama%2FLlama-3.1-8B", "meta-llama/Llama-3.1-8B"),
        ("/v1/realtime?model=meta-llama/Llama", "meta-llama/Llama"),
        ("/v1/realtime?model=a%20b+c", "a b c"),
        ("/v1/realtime?model=%C3%A9", "é"),
        ("/v1/realtime?model=é", "é"),
        ("/v1/realtime?model=a=b", "a=b"),
        ("/v1/realtime?model=a?b", "a?b"),
        ("/v1/realtime?model=a#model=b", "a"),
        ("/v1/realtime?model=a&model=b", "b"),
        ("/v1/realtime?model=a%26b", "a&b"),
        ("/v1/realtime?model=100%", "100%"),
        ("/v1/realtime?&&model=a&", "a"),
        ("?model=a", "a"),
        # nothing
        ("/v1/realtime?model=", ""),
        ("/v1/realtime?model", ""),
        ("/v1/realtime?Model=a", ""),
        ("/v1/realtime?xmodel=a&models=b", ""),
        ("/v1/realtime?x=model=a", ""),
        ("/v1/model=a", ""),
        ("/v1/realtime#?model=a", ""),
        ("/v1/realtime?model=%FF", ""),
        ("/v1/realtime?model=a%00", ""),
        ("/v1/realtime?model=a%0D%0Ab", ""),
        ("/v1/realtime?model=a\udc80", ""),
        ("", ""),
    ],
)
def test_query_parameter(path, model):
    """Percent-decoded; what cannot be decoded, or printed, is no name."""
    assert model_name({}, path, None, "") == model


# Forms


@pytest.mark.parametrize(
    "parts",
    [
        [(FIELD, b"m")],
        [(FIELD, b"m"), (FILE, b"RIFF")],
        [(FILE, b"RIFF"), (FIELD, b"m")],
        [(FILE, b""), (FIELD, b"m"), (FILE, b"")],
        [(FIELD, b"other"), (FIELD, b"m")],
        [(b'Content-Disposition: form-data; name="language"', b"en"), (FIELD, b"m")],
    ],
)
def test_field_may_stand_anywhere(parts):
    """Before the file, behind it, between two; of several the last one counts."""
    assert in_form(form(*parts)) == "m"


@pytest.mark.parametrize(
    "headers",
    [
        b"content-disposition:form-data;name=model",
        b"CONTENT-DISPOSITION: FORM-DATA; NAME=model",
        b'Content-Disposition: form-data ; name = "model" ;',
        b'Content-Disposition:\tform-data;\tname="mo\\del"',
        b'Content-Disposition: form-data; x="; filename=a"; name="model"',
        b'Content-Disposition: form-data; x="\\"; filename=a"; name="model"',
        b"Content-Type: text/plain\r\n" + FIELD,
        FIELD + b"\r\nContent-Type: text/plain; charset=utf-8",
    ],
)
def test_headers_of_the_field_as_they_may_be_written(headers):
    """Quoted or not, in any case, among other headers."""
    assert in_form(form((headers, b"m"))) == "m"


@pytest.mark.parametrize(
    "headers",
    [
        b'Content-Disposition: form-data; name="model"; filename="model"',
        b'Content-Disposition: form-data; filename="x"; name="model"',
        b"Content-Disposition: form-data; filename*=utf-8''x; name=\"model\"",
        b'Content-Disposition: form-data; name="model"; FileName=x',
        b'Content-Disposition: form-data; name="Model"',
        b'Content-Disposition: form-data; name=" model"',
        b'Content-Disposition: form-data; name="models"',
        b'Content-Disposition: form-data; name="model[]"',
        b'Content-Disposition: form-data; name="x; name=model"',
        b'Content-Disposition: form-data; name="x\\"; name=\\"model"',
        b'Content-Disposition: form-data; name="model',
        b'Content-Disposition: form-data; name="model"x',
        b'Content-Disposition: form-data; name="model"; filename',
        b'Content-Disposition: form-data; name="model"; filename="a\\"',
        b'Content-Disposition: form-data name="model"',
        b'Content-Disposition: form-datax; name="model"',
        b'Content-Disposition: attachment; name="model"',
        b'Content-Disposition: form-data; name="model"\r; filename="x"',
        b"Content-Disposition: form-data",
        b'Content-Disposition form-data; name="model"',
        b'X-Content-Disposition: form-data; name="model"',
        b'X: y\nContent-Disposition: form-data; name="model"',
        b'name="model"',
        b"",
    ],
)
def test_what_is_not_the_field(headers):
    """Files, other names and malformed headers do not count."""
    assert in_form(form((headers, b"m"))) == ""


@pytest.mark.parametrize(
    ("content_type", "boundary"),
    [
        ('multipart/form-data; boundary="b0"', b"b0"),
        ("Multipart/Form-Data;BOUNDARY=b0", b"b0"),
        ("multipart/form-data ; charset=utf-8 ; boundary=b0 ; x=y", b"b0"),
        ('multipart/form-data; x="; boundary=a"; boundary=b0', b"b0"),
        ('multipart/form-data; boundary="a b\\"\\\\"', b'a b"\\'),
        (
            "multipart/form-data; boundary=----WebKitFormBoundary7MA4YWxk",
            b"----WebKitFormBoundary7MA4YWxk",
        ),
        ("multipart/form-data; boundary='()+_,-./:=?", b"'()+_,-./:=?"),
        (f"multipart/form-data; boundary={'x' * 70}", b"x" * 70),
    ],
)
def test_boundary_as_it_may_be_written(content_type, boundary):
    """Quoted or not, between other parameters."""
    assert in_form(form((FILE, b"x"), (FIELD, b"m"), boundary=boundary), content_type) == "m"


@pytest.mark.parametrize(
    "content_type",
    [
        "",
        "multipart/form-data",
        "multipart/form-data;",
        "multipart/form-data; boundary",
        "multipart/form-data; boundary=",
        'multipart/form-data; boundary=""',
        'multipart/form-data; boundary="b0',
        "multipart/form-data; boundary=b0 x",
        "multipart/form-data; boundary=b1",
        "multipart/form-data; boundary=b",
        "multipart/form-data; boundary=é",
        "multipart/form-data; boundary=\u20ac\udc80",
        "multipart/form-data; x=boundary=b0; =",
        "multipart/form-datax; boundary=b0",
        "multipart/mixed; boundary=b0",
        "application/json; boundary=b0",
    ],
)
def test_body_without_its_boundary_is_not_searched(content_type):
    """Only a form with a known boundary can be told apart from its uploads."""
    assert in_form(form((FIELD, b"m")), content_type) == ""


@pytest.mark.parametrize(
    ("body", "model"),
    [
        (b"preamble\r\n" + form((FIELD, b"m")), "m"),
        (b"\r\n" + form((FIELD, b"m")), "m"),
        (b"preamble" + form((FIELD, b"m")), ""),
        (form((FIELD, b"m")).replace(b"--b0\r\n", b"--b0 \t\r\n"), "m"),
        (b"--b0\r\n" + form((FIELD, b"m")), "m"),
        (form() + b"\r\n" + form((FIELD, b"m")), ""),
        (form((FIELD, b"m")).removesuffix(b"--\r\n"), ""),
        (form((FIELD, b"m")).removesuffix(b"\r\n"), "m"),
        (b"--b0\r\n" + FIELD + b"\r\n\r\nm", ""),
        (b"--b0\r\n" + FIELD + b"\r\n--b0--", ""),
        (b"--b0\r\n" + FIELD + b"\r\n\r\n--b0--", ""),
        (b"--b0\r\n" + FIELD + b"\r\n\r\n\r\n--b0--", ""),
        (b"--b0\r\n\r\n" + FIELD + b"\r\n\r\nm\r\n--b0--", ""),
        (b"--b0\r\n\r\n--b0\r\n" + FIELD + b"\r\n\r\nm\r\n--b0--", "m"),
        (form((FIELD, b"m")).replace(b"\r\n", b"\n"), ""),
        (b"--b0", ""),
        (b"--b0\r", ""),
        (b"--b0\r\n", ""),
        (b"--b0--", ""),
        (b"", ""),
    ],
)
def test_lines_of_the_boundary(body, model):
    """Preamble and epilogue are nothing, padding is allowed, a part that does not end is none."""
    assert in_form(body) == model


@pytest.mark.parametrize(
    "upload",
    [
        FIELD + b"\r\n\r\nwrong",
        b"\r\n\r\n" + FIELD + b"\r\n\r\nwrong\r\n",
        b"x--b0\r\n" + FIELD + b"\r\n\r\nwrong",
        b"\n--b0\r\n" + FIELD + b"\r\n\r\nwrong\n--b0--",
        b"\r\n-b0\r\n" + FIELD + b"\r\n\r\nwrong",
        b"\r\n--b\r\n" + FIELD + b"\r\n\r\nwrong",
        b"\r\n--b00\r\n" + FIELD + b"\r\n\r\nwrong",
        b"\r\n--b0 x\r\n" + FIELD + b"\r\n\r\nwrong",
        b"\r\n--b0\n" + FIELD + b"\r\n\r\nwrong",
        b"\r\n--b0-\r\n" + FIELD + b"\r\n\r\nwrong",
    ],
)
def test_upload_is_not_taken_for_a_field(upload):
    """Text like a field counts only behind a line of the boundary."""
    assert in_form(form((FILE, upload))) == ""
    assert in_form(form((FIELD, b"m"), (FILE, upload))) == "m"
    assert in_form(form((FILE, upload), (FIELD, b"m"))) == "m"


@pytest.mark.parametrize(
    ("value", "model"),
    [
        (b"x" * MAX_FORM_MODEL_BYTES, "x" * MAX_FORM_MODEL_BYTES),
        (b"x" * (MAX_FORM_MODEL_BYTES + 1), ""),
        ("é/ü".encode(), "é/ü"),
        (b" m ", " m "),
        (b"\xff", ""),
        (b"a\0", ""),
        (b"a\r\nb", ""),
        (b"a\r\n\r\nb", ""),
        (b"", ""),
    ],
)
def test_value_of_the_field(value, model):
    """Taken as it is, when it can be a name."""
    assert in_form(form((FIELD, value))) == model


def test_headers_of_a_part_are_bounded():
    """A part with longer ones is not looked into."""
    longest = b"X: " + b"x" * (MAX_PART_HEADERS_BYTES - len(FIELD) - 9) + b"\r\n" + FIELD

    assert in_form(form((longest, b"m"))) == "m"
    assert in_form(form((b"x" + longest, b"m"))) == ""


def test_parts_are_bounded():
    """A form of nothing but boundaries, or of what begins like them, costs a bounded time."""
    field = (b"X: y", b"")

    assert in_form(form(*[field] * (MAX_BOUNDARIES - 2), (FIELD, b"m"))) == "m"
    assert in_form(form(*[field] * (MAX_BOUNDARIES - 1), (FIELD, b"m"))) == ""
    assert in_form(form((FILE, b"\r\n--b0x" * MAX_BOUNDARIES), (FIELD, b"m"))) == ""


# As clients write forms


class _Writer:
    """What aiohttp writes a body to."""

    def __init__(self):
        self.body = b""

    async def write(self, chunk):
        self.body += bytes(chunk)


@pytest.mark.parametrize("field_first", [True, False])
async def test_form_of_aiohttp(field_first):
    """The field is found in what aiohttp sends."""
    data, writer = aiohttp.FormData(), _Writer()
    if field_first:
        data.add_field("model", "openai/whisper-large-v3 é")
    data.add_field("file", io.BytesIO(b"RIFF\r\n\0" * 100), filename='my "model".wav')
    if not field_first:
        data.add_field("model", "openai/whisper-large-v3 é")

    payload: Any = data()
    await payload.write(writer)

    found = model_name({"content-type": payload.headers["Content-Type"]}, UPLOADS, writer.body, "")
    assert found == "openai/whisper-large-v3 é"


@pytest.mark.parametrize(
    "ask",
    [
        lambda client: client.audio.transcriptions.create(
            model="openai/whisper",
            file=("a.wav", b"RIFF\r\n--\r\n"),
            timestamp_granularities=["word", "segment"],
            prompt='name="model"',
        ),
        lambda client: client.images.edit(
            model="openai/whisper", image=[b"\x89PNG\r\n", b"\x89PNG\r\n"], prompt="a cat"
        ),
    ],
    ids=["audio", "pictures"],
)
def test_form_of_the_openai_client(ask):
    """The field is found in what the OpenAI client would send."""
    found = []

    def intercept(request):
        found.append(model_name(request.headers, request.url.path, request.read(), ""))
        raise ConnectionError

    transport = openai.DefaultHttpxClient(event_hooks={"request": [intercept]})
    url = "http://127.0.0.1:1/v1"
    with (
        openai.OpenAI(api_key="k", base_url=url, http_client=transport, max_retries=0) as client,
        pytest.raises((ConnectionError, openai.APIConnectionError)),
    ):
        ask(client)

    assert found == ["openai/whisper"]


# Anything

_boundaries = st.text("abcXYZ019'+_,-./:=?", min_size=1, max_size=70).map(str.encode)
_tokens = st.sampled_from(
    [
        b"\r\n",
        b"--",
        b"b0",
        b"\r\n--b0",
        b"\r\n--b0\r\n",
        FIELD,
        FILE,
        b"\r\n\r\n",
        b"m",
        b" ",
        b'"',
    ]
)
_uploads = st.binary(max_size=60) | st.lists(_tokens, max_size=12).map(b"".join)


@given(
    boundary=st.just(b"b0") | _boundaries,
    before=st.lists(_uploads, max_size=4),
    after=st.lists(_uploads, max_size=4),
    model=st.text(st.characters(categories=["L", "N", "P"]), min_size=1, max_size=60),
    quoted=st.booleans(),
    preamble=st.sampled_from([b"", b"\r\n", b"preamble\r\n"]),
)
def test_field_is_found_between_any_uploads(boundary, before, after, model, quoted, preamble):
    """Whatever the files are, as long as they do not contain the boundary."""
    clean = [
        [(FILE, upload) for upload in uploads if b"\r\n--" + boundary not in b"\r\n" + upload]
        for uploads in (before, after)
    ]
    parts = [*clean[0], (FIELD, model.encode()), *clean[1]]
    shown = f'"{boundary.decode()}"' if quoted else boundary.decode()

    body = preamble + form(*parts, boundary=boundary)

    assert in_form(body, f"multipart/form-data; boundary={shown}") == model


@given(
    content_type=st.text(max_size=30)
    | st.text('=;"\\ boundary', max_size=30).map("multipart/form-data; boundary=".__add__),
    path=st.text(max_size=30) | st.text("?&=#%+model0fF", max_size=30).map("/?model=".__add__),
    body=st.none() | _uploads | _uploads.map(b"--b0\r\n".__add__),
)
def test_nothing_raises(content_type, path, body):
    """Any input gives a name that can be printed and encoded, or none."""
    for header in (content_type, "multipart/form-data; boundary=b0"):
        found = model_name({"content-type": header}, path, body, "")

        assert found.isprintable()
        assert found.encode().decode() == found


@pytest.mark.parametrize(
    "body",
    [
        b"\r\n--b0" * 2**18,
        b"\r\n--b0\r\n" * 2**18,
        b"\r\n" * 2**20,
        b"\r\n-" * 2**20,
        b"--b0" + b" " * 2**21,
        b"--b0\r\n" + b"\r" * 2**21,
        b"--b0\r\n" + (FIELD + b"; x") * 2**16,
        b"--b0\r\n" + FIELD + b'; x="' + b"\\" * 2**21,
        form((FIELD + b'; x="' + b"\\" * 4_000, b"m")),
        form((FIELD + b";" * 4_000, b"m")),
        form((b"\r\n" * 1_000 + FIELD + b" " * 1_000, b"m")),
    ],
    ids=range(11),
)
def test_hostile_form_is_bearable(body):
    """No part of the search runs away."""
    assert in_form(body) in {"", "m"}
