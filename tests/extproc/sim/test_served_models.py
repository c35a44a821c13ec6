"""Which models a worker answers for, and how they change at run time."""

import pytest

CHAT = "/v1/chat/completions"


async def shown(http, worker):
    """Return the entries of ``/v1/models``."""
    document = await (await http.get(worker.url + "/v1/models")).json()
    assert document["object"] == "list"
    return document["data"]


async def names(http, worker):
    """Return the names that ``/v1/models`` lists."""
    return [card["id"] for card in await shown(http, worker)]


async def test_adapters_are_listed_after_the_base_models(start_worker, http):
    """Each with the first base model as its parent and its path as its root."""
    worker = await start_worker(models=("base", "alias"), lora_modules=("a", "b=/lora/b"))

    cards = await shown(http, worker)

    assert [(card["id"], card["parent"], card["root"]) for card in cards] == [
        ("base", None, "base"),
        ("alias", None, "base"),
        ("a", "base", "/adapters/a"),
        ("b", "base", "/lora/b"),
    ]
    assert [card["max_model_len"] for card in cards] == [131_072, 131_072, None, None]


async def test_an_adapter_answers_under_its_name(start_worker, http, chat_body):
    """And shares no blocks of the prefix cache with its base model or another adapter."""
    worker = await start_worker(lora_modules=("a", "b"))

    async def ask(model):
        body = chat_body("x" * 200, model=model)
        answer = await (await http.post(worker.url + CHAT, json=body)).json()
        assert answer["model"] == model
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    first = [await ask(model) for model in ("sim-model", "a", "b")]
    second = [await ask(model) for model in ("sim-model", "a", "b")]

    assert first == [0, 0, 0]
    assert min(second) > 0


async def test_adapters_come_and_go(worker, http, chat_body):
    """With the texts that vLLM answers."""
    asked = {"lora_name": "a", "lora_path": "/lora/a"}

    loaded = await http.post(worker.url + "/v1/load_lora_adapter", json=asked)
    listed = await names(http, worker)
    served = await http.post(worker.url + CHAT, json=chat_body(model="a"))
    unloaded = await http.post(worker.url + "/v1/unload_lora_adapter", json={"lora_name": "a"})
    refused = await http.post(worker.url + CHAT, json=chat_body(model="a"))

    assert (loaded.status, unloaded.status) == (200, 200)
    assert await loaded.text() == "Success: LoRA adapter 'a' added successfully."
    assert await unloaded.text() == "Success: LoRA adapter 'a' removed successfully."
    assert listed == ["sim-model", "a"]
    assert await names(http, worker) == ["sim-model"]
    assert (served.status, refused.status) == (200, 404)


@pytest.mark.parametrize(
    ("verb", "fields", "status", "kind", "message"),
    [
        ("load", {"lora_name": "a"}, 400, "Bad Request", "missing required field `lora_path`"),
        (
            "load",
            {"lora_name": "a", "lora_path": ""},
            400,
            "InvalidUserInput",
            "Both 'lora_name' and 'lora_path' must be provided.",
        ),
        (
            "load",
            {"lora_name": "sim-model", "lora_path": "/p"},
            400,
            "InvalidUserInput",
            "The lora adapter 'sim-model' conflicts with a served base model.",
        ),
        (
            "load",
            {"lora_name": "old", "lora_path": "/p"},
            400,
            "InvalidUserInput",
            "The lora adapter 'old' has already been loaded.",
        ),
        (
            "unload",
            {"lora_name": ""},
            400,
            "InvalidUserInput",
            "'lora_name' needs to be provided to unload a LoRA adapter.",
        ),
        (
            "unload",
            {"lora_name": "a"},
            404,
            "NotFoundError",
            "The lora adapter 'a' cannot be found.",
        ),
    ],
)
async def test_an_impossible_change_is_refused(
    start_worker, http, verb, fields, status, kind, message
):
    """As vLLM does; the list stays."""
    worker = await start_worker(lora_modules=("old",))

    answer = await http.post(worker.url + f"/v1/{verb}_lora_adapter", json=fields)

    error = (await answer.json())["error"]
    assert (answer.status, error["code"], error["type"]) == (status, status, kind)
    assert message in error["message"]
    assert await names(http, worker) == ["sim-model", "old"]


async def test_an_adapter_is_loaded_again_in_place(start_worker, http):
    """With its new path."""
    worker = await start_worker(lora_modules=("a",))
    asked = {"lora_name": "a", "lora_path": "/new", "load_inplace": True}

    answer = await http.post(worker.url + "/v1/load_lora_adapter", json=asked)

    assert answer.status == 200
    assert (await shown(http, worker))[-1]["root"] == "/new"


async def test_base_models_are_replaced(start_worker, http, chat_body):
    """As by a start with other models: list, requests, metrics and parents follow."""
    worker = await start_worker(lora_modules=("a",))
    await http.post(
        worker.url + "/v1/load_lora_adapter", json={"lora_name": "b", "lora_path": "/b"}
    )

    changed = await http.post(worker.url + "/_sim/models", json={"models": ["new", "alias"]})

    assert (changed.status, await changed.json()) == (200, {"models": ["new", "alias"]})
    cards = await shown(http, worker)
    assert [(card["id"], card["parent"]) for card in cards] == [
        ("new", None),
        ("alias", None),
        ("a", "new"),
    ]
    assert 'model_name="new"' in await (await http.get(worker.url + "/metrics")).text()
    old, new = [
        await http.post(worker.url + CHAT, json=chat_body(model=model))
        for model in ("sim-model", "new")
    ]
    assert (old.status, new.status) == (404, 200)
    assert (await old.json())["error"] == {
        "message": "The model `sim-model` does not exist. Valid aliases: new, alias.",
        "type": "NotFoundError",
        "param": "model",
        "code": 404,
    }


@pytest.mark.parametrize("body", ['{"models": []}', '{"models": [""]}', '{"model": "x"}', "["])
async def test_a_worker_never_has_no_model(worker, http, body):
    """A wrong list is refused and changes nothing."""
    answer = await http.post(worker.url + "/_sim/models", data=body)

    assert answer.status == 400
    assert await names(http, worker) == ["sim-model"]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/responses", {"input": "x"}),
        ("/v1/embeddings", {"input": "x"}),
        ("/rerank", {"query": "x", "documents": ["x"]}),
        ("/tokenize", {"prompt": "x"}),
        ("/detokenize", {"tokens": [1]}),
    ],
)
async def test_an_unknown_model_is_not_found_anywhere(worker, http, path, fields):
    """No model, or an empty name, means the first one."""
    answers = [
        await http.post(worker.url + path, json={**fields, "model": model})
        for model in ("other", "", None)
    ]

    assert [answer.status for answer in answers] == [404, 200, 200]
