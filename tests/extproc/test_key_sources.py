"""Where the keys of clients come from, and what becomes of those that cannot be used."""

from __future__ import annotations

import asyncio
import json

import msgspec
import pytest
from structlog.testing import capture_logs

from extproc import key_sources
from extproc.config import Config
from extproc.errors import ConfigError
from extproc.key_sources import (
    KEY_OPTIONS,
    LOCKED_OUT,
    UNCHANGED,
    KeySources,
    key_files,
    read_auth,
)
from extproc.reload import RELOADABLE
from extproc.xds.model import ApiKey, ApiKeys, AskedTokens, NobodyYet, Passwords, SignedTokens
from tests.signed_tokens import ISSUER, jwks

HASH = "{SHA}0DPiKuNIrrVmD8IUCuw1hQxNqZc="
URL = "https://idp.example/keys"


@pytest.fixture
def write(tmp_path):
    """Write a file and return its path."""

    def write(name, text):
        path = tmp_path / name
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return str(path)

    return write


def test_without_options_everybody_gets_in():
    """The default."""
    assert read_auth(Config()) is None


def test_single_key_and_those_of_a_file_go_together(write):
    """The single one has a name, too."""
    config = Config(api_key="sk-0", api_keys_file=write("keys", "team-a sk-a\n"))

    assert read_auth(config) == ApiKeys((ApiKey("api-key", "sk-0"), ApiKey("team-a", "sk-a")))
    assert key_files(config) == (config.api_keys_file,)


def test_other_ways(write):
    """Passwords, signed tokens of a file, and tokens that others are asked about."""
    htpasswd, keys = write("htpasswd", f"joe:{HASH}\n"), write("jwks", jwks())
    signed = Config(jwt_issuer=ISSUER, jwt_jwks=keys, jwt_audiences=("llm",))

    assert read_auth(Config(htpasswd_file=htpasswd)) == Passwords(f"joe:{HASH}\n")
    assert key_files(Config(htpasswd_file=htpasswd)) == (htpasswd,)
    found = read_auth(signed)
    assert isinstance(found, SignedTokens)
    assert (found.issuer, found.audiences) == (ISSUER, ("llm",))
    assert json.loads(found.jwks) == json.loads(jwks())
    assert key_files(signed) == (keys,)
    asked = Config(
        api_key_validation_urls=("https://a.example",), api_key_validation_timeout_secs=3
    )
    assert read_auth(asked) == AskedTokens(4)
    assert key_files(asked) == ()


def test_keys_of_a_url_lock_everybody_out_until_they_were_had():
    """And those of another URL are none."""
    config = Config(jwt_issuer=ISSUER, jwt_jwks=URL)

    assert read_auth(config) == NobodyYet()
    assert read_auth(config, fetched={"https://other.example": jwks()}) == NobodyYet()
    assert read_auth(config, fetched={URL: "x"}) == SignedTokens(ISSUER, "x")
    assert key_files(config) == ()


@pytest.mark.parametrize(
    ("option", "content", "reason"),
    [
        ("api_keys_file", None, "--api-keys-file: cannot read {path}: No such file or directory"),
        (
            "api_keys_file",
            "a b c",
            "--api-keys-file: {path}, line 1: expected NAME KEY, got 3 words",
        ),
        ("api_keys_file", "", "--api-keys-file: {path}, there is no key in it"),
        ("api_keys_file", "a sk-0", "--api-keys-file: {path} holds the key of --api-key, too"),
        ("api_keys_file", b"a b\n\xff c", "--api-keys-file: {path}, line 2: it is not UTF-8 text"),
        (
            "api_keys_file",
            b"#" * (2**20 + 1),
            "--api-keys-file: {path} is larger than 1048576 bytes",
        ),
        ("htpasswd_file", "joe:x", "--htpasswd-file: {path}, line 1: the password is not hashed"),
        ("jwt_jwks", "{", "--jwt-jwks: {path}, line 1: it is not JSON"),
    ],
)
def test_file_that_cannot_be_used_is_named(write, tmp_path, option, content, reason):
    """With its line, where it has one."""
    path = str(tmp_path / "x") if content is None else write("x", content)
    options = {option: path}
    if option == "jwt_jwks":
        options["jwt_issuer"] = ISSUER
    if option == "api_keys_file":
        options["api_key"] = "sk-0"

    with pytest.raises(ConfigError) as refused:
        read_auth(Config(**options))

    assert str(refused.value).startswith(reason.format(path=path))


def test_path_that_is_none_is_refused():
    """A NUL comes from a file of options."""
    with pytest.raises(ConfigError, match="not a path"):
        read_auth(Config(htpasswd_file="a\0b"))


def test_every_option_of_keys_can_be_reloaded():
    """What is followed while a router runs can be changed while it runs."""
    assert KEY_OPTIONS <= RELOADABLE


def test_start_fails_with_a_file_that_cannot_be_used(write):
    """Nobody would get in; whoever starts it sees why."""
    with pytest.raises(ConfigError):
        KeySources(Config(api_keys_file=write("keys", "")))


def test_reload_that_names_a_broken_file_changes_nothing(write):
    """The configuration is refused as a whole."""
    sources = KeySources(Config(api_key="sk-0"))
    before = sources.auth

    with pytest.raises(ConfigError):
        sources.configure(Config(api_keys_file=write("keys", "")))

    assert sources.auth == before


def test_file_that_broke_meanwhile_does_not_stand_in_the_way_of_another_reload(write):
    """It is followed for itself; the last good keys stay."""
    path = write("keys", "a sk-a")
    sources = KeySources(Config(api_keys_file=path))
    write("keys", "broken")

    sources.configure(Config(api_keys_file=path, queue_size=7))

    assert sources.auth == ApiKeys((ApiKey("a", "sk-a"),))


@pytest.fixture
def files_read_at_once(monkeypatch):
    """Read in this thread: another takes real time, of which there is none here."""

    async def call(function, *arguments):
        return function(*arguments)

    monkeypatch.setattr(asyncio, "to_thread", call)


@pytest.mark.usefixtures("files_read_at_once")
@pytest.mark.looptime
async def test_file_is_followed(write):
    """What changes is told; what is broken is logged, without its content, and changes nothing."""
    path = write("keys", "a sk-a")
    sources = KeySources(Config(api_keys_file=path))
    seen = []
    with capture_logs() as logs:
        task = asyncio.create_task(sources.run(lambda: seen.append(sources.auth)))
        await asyncio.sleep(5)
        write("keys", "a sk-b")
        await asyncio.sleep(5)
        write("keys", "a sk-b\nsk-c")
        await asyncio.sleep(5)
        task.cancel()
        await asyncio.wait([task])

    assert seen == [ApiKeys((ApiKey("a", "sk-b"),))]
    assert sources.auth == seen[-1]
    assert [entry["event"] for entry in logs] == [
        "keys of clients changed",
        "keys of clients refused; those in use stay",
    ]
    assert logs[0]["clients"] == ["a"]
    assert "line 2" in logs[1]["reason"]
    assert "sk-" not in repr(logs)


@pytest.mark.usefixtures("files_read_at_once")
@pytest.mark.looptime
async def test_file_that_changed_before_it_was_followed_is_read(write):
    """Between the start and the first look."""
    path = write("keys", "a sk-a")
    sources = KeySources(Config(api_keys_file=path))
    write("keys", "a sk-b")
    task = asyncio.create_task(sources.run(lambda: None))
    await asyncio.sleep(0)

    assert sources.auth == ApiKeys((ApiKey("a", "sk-b"),))
    task.cancel()
    await asyncio.wait([task])


@pytest.mark.usefixtures("files_read_at_once")
@pytest.mark.looptime
async def test_url_is_asked_until_it_answers_and_every_five_minutes(monkeypatch):
    """Sooner after a failure, ever later; what was had stays when it fails afterwards."""
    answers = [
        OSError("away"),
        "nonsense",
        jwks(),
        jwks(kid="two"),
        ValueError("it answers 500"),
        jwks(kid="three", alg="HS256"),
    ]
    asked = []
    loop = asyncio.get_running_loop()
    started = loop.time()

    async def fetch(url):
        asked.append((url, round(loop.time() - started)))
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(key_sources, "_fetch", fetch)
    sources = KeySources(Config(jwt_issuer=ISSUER, jwt_jwks=URL))
    seen = []
    with capture_logs() as logs:
        task = asyncio.create_task(sources.run(lambda: seen.append(sources.auth)))
        await asyncio.sleep(609)
        task.cancel()
        await asyncio.wait([task])

    assert asked == [(URL, at) for at in (0, 2, 6, 306, 606, 608)]
    assert [json.loads(auth.jwks)["keys"][0]["kid"] for auth in seen] == ["one", "two"]
    assert sources.auth == seen[-1]
    failures = [entry for entry in logs if entry["log_level"] == "error"]
    assert [entry["event"] for entry in failures] == [LOCKED_OUT] * 2 + [UNCHANGED] * 2
    assert all(entry["url"] == URL for entry in failures)


@pytest.mark.usefixtures("files_read_at_once")
@pytest.mark.looptime
async def test_start_goes_on_without_the_keys_of_a_url_that_hangs(monkeypatch):
    """Nobody gets in, which the log says; once they are had, everybody with a token does."""
    held = asyncio.Event()

    async def fetch(_url):
        await held.wait()
        return jwks()

    monkeypatch.setattr(key_sources, "_fetch", fetch)
    sources = KeySources(Config(jwt_issuer=ISSUER, jwt_jwks=URL))
    task = asyncio.create_task(sources.run(lambda: None))
    with capture_logs() as logs:
        await sources.settle(2)
    early = sources.auth
    held.set()
    with capture_logs() as later:
        await sources.settle(2)
    task.cancel()
    await asyncio.wait([task])

    assert early == NobodyYet()
    assert [(entry["log_level"], entry["url"]) for entry in logs] == [("warning", URL)]
    assert isinstance(sources.auth, SignedTokens)
    assert [entry["log_level"] for entry in later] == ["info"]


@pytest.mark.usefixtures("files_read_at_once")
@pytest.mark.looptime
async def test_another_url_is_asked_at_once(monkeypatch):
    """And until it answers nobody gets in: the keys of the other issuer are none of this one."""
    other = "https://other.example/keys"
    held = asyncio.Event()

    async def fetch(url):
        if url == other:
            await held.wait()
        return jwks(kid="one" if url == URL else "two")

    monkeypatch.setattr(key_sources, "_fetch", fetch)
    config = Config(jwt_issuer=ISSUER, jwt_jwks=URL)
    sources = KeySources(config)
    task = asyncio.create_task(sources.run(lambda: None))
    await asyncio.sleep(1)
    first = sources.auth
    sources.configure(msgspec.structs.replace(config, jwt_jwks=other))
    await asyncio.sleep(1)
    between = sources.auth
    held.set()
    await asyncio.sleep(1)
    task.cancel()
    await asyncio.wait([task])

    assert isinstance(first, SignedTokens)
    assert between == NobodyYet()
    assert isinstance(sources.auth, SignedTokens)
    assert sources.auth != first
