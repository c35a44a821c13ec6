"""Cache aware: prompts go where most of their beginning is, as long as loads allow it."""

from __future__ import annotations

import collections
import dataclasses
import random

import pytest

from policies.base import CacheKeeper, Request
from policies.cache_aware import EVICT_TO_RATIO, CacheAware
from tests.policies.fleets import Fleet, chat, completion, fleet

WORDS = [
    "alpha",
    "beta",
    "gamma",
    "delta",
    "epsilon",
    "zeta",
    "eta",
    "theta",
    "iota",
    "kappa",
    "lambda",
    "mu",
    "nu",
    "xi",
    "omicron",
    "pi",
]


def pool_of(count, *, seed=1, weights=None, per_host=1, **parameters):
    members = fleet(count, weights=weights, per_host=per_host)
    return Fleet(CacheAware(**parameters), members, seed=seed)


def prose(rng, words):
    return " ".join(rng.choices(WORDS, k=words))


def loaded(pool, *loads):
    for worker, load in zip(pool.members, loads, strict=True):
        worker.in_flight = load


def sizes(pool):
    """Return the characters of each member's tree, in order."""
    policy = pool.policy
    return [policy._tree.characters[policy._slots[worker.order]] for worker in pool.members]


@pytest.fixture
def hello():
    """Return the pool of the documentation: "hello world" was sent to A, "hello vllm" to B."""
    pool = pool_of(2)
    a, b = pool.members
    pool.send(completion("hello world"), to=a)
    pool.send(completion("hello vllm"), to=b)
    return pool


def test_example_of_the_documentation(hello):
    """The prompt "hello world from user" matches A at 11/21."""
    a, b = hello.members
    policy = hello.policy

    assert policy._tree.match("c:m", "hello world from user").longest(0b11) == (11, 0b01)
    assert policy._tree.match("c:m", "hello vllm").longest(0b11) == (10, 0b10)
    assert policy._tree.match("c:m", "hello there").longest(0b11) == (6, 0b11)
    for _ in range(20):
        assert hello.pick(completion("hello world from user")) is a
        assert hello.pick(completion("hello vllm from user")) is b


@pytest.mark.parametrize(
    ("threshold", "length", "follows"),
    [
        (0.5, 10, False),
        (0.5, 9, True),
        (0.25, 20, False),
        (0.25, 19, True),
        (0.0, 1000, True),
        (1.0, 5, False),
        (0.999, 5, True),
    ],
)
def test_ratio_must_be_strictly_above_the_threshold(threshold, length, follows):
    """Five characters of *length* are known; exactly the threshold is no match."""
    pool = pool_of(2, cache_threshold=threshold)
    a, b = pool.members
    # B has the smaller tree, so that is where a prompt without a match goes.
    pool.send(completion("abcde"), to=a)
    pool.send(completion("xyz"), to=b)

    prompt = "abcde" + "-" * (length - 5)

    assert pool.pick(completion(prompt)) is (a if follows else b)


def test_ratio_is_one_when_all_is_known():
    """Also when more than the prompt is known."""
    pool = pool_of(2, cache_threshold=0.999)
    a, b = pool.members
    pool.send(completion("abcdefgh"), to=a)
    pool.send(completion("x"), to=b)

    assert pool.pick(completion("abcdefgh")) is a
    assert pool.pick(completion("abc")) is a


@pytest.mark.parametrize(
    ("affine", "lowest", "stays"),
    [
        (32, 0, True),  # exactly the absolute threshold
        (33, 0, False),
        (330, 300, True),  # below the absolute one, and exactly the relative one
        (340, 300, False),  # above both
        (333, 300, False),
        (352, 320, True),
        (1100, 1000, True),  # far above the absolute one, exactly the relative one
        (1101, 1000, False),
        (0, 50, True),  # the matched worker is the idlest
    ],
)
def test_overloaded_worker_is_left_alone(affine, lowest, stays):
    """More than 32 above the lowest and more than 1.1 times it: both, and strictly."""
    pool = pool_of(3)
    a, _, _ = pool.members
    prompt = completion("known text")
    pool.send(prompt, to=a)
    loaded(pool, affine, lowest, max(affine, lowest))

    picked = {pool.pick(prompt).order for _ in range(20)}

    assert picked == ({0} if stays else {1})


@pytest.mark.parametrize(
    ("highest", "lowest", "by_tree"),
    [
        (32, 0, True),
        (33, 0, False),
        (330, 300, True),
        (331, 300, True),  # 331 > 330, but 31 is not above 32
        (333, 300, False),
        (1100, 1000, True),
        (1101, 1000, False),
    ],
)
def test_without_match_imbalance_decides_between_tree_and_load(highest, lowest, by_tree):
    """When max - min > abs and max > min * rel the least loaded; otherwise the smallest tree."""
    pool = pool_of(3)
    a, b, c = pool.members
    pool.send(completion("long text of a"), to=a)
    pool.send(completion("xyz"), to=b)
    pool.send(completion("more of c"), to=c)
    loaded(pool, lowest, highest, highest)

    picked = {pool.pick(completion("never seen")).order for _ in range(20)}

    assert picked == ({1} if by_tree else {0})


def test_thresholds_are_parameters():
    """Smaller ones give way earlier."""
    pool = pool_of(2, balance_abs_threshold=0, balance_rel_threshold=1.0)
    a, b = pool.members
    pool.send(completion("known"), to=a)
    loaded(pool, 1, 0)
    assert pool.pick(completion("known")) is b
    loaded(pool, 1, 1)
    assert pool.pick(completion("known")) is a


def test_tree_learns_what_balance_sent_elsewhere():
    """From then on both have it, and the one with the lower load gets it."""
    pool = pool_of(3)
    a, b, _ = pool.members
    prompt = completion("a hot prompt")
    pool.send(prompt, to=a)
    loaded(pool, 40, 0, 20)

    assert pool.send(prompt) is b
    loaded(pool, 3, 2, 0)
    assert pool.pick(prompt) is b
    loaded(pool, 2, 3, 0)
    assert pool.pick(prompt) is a
    loaded(pool, 2, 2, 0)
    assert {pool.pick(prompt) for _ in range(40)} == {a, b}


def test_ties_of_the_smallest_tree_are_broken_by_chance():
    """Among those that tie, all of them."""
    pool = pool_of(4)
    pool.send(completion("something"), to=pool.members[2])

    got = collections.Counter(pool.pick(completion("new")).order for _ in range(600))

    assert sorted(got) == [0, 1, 3]
    assert min(got.values()) > 130


def test_smallest_tree_is_that_of_the_candidates():
    """Somebody unavailable may have a smaller one."""
    pool = pool_of(3)
    a, b, c = pool.members
    pool.send(completion("aa"), to=a)
    pool.send(completion("cccc"), to=c)

    assert pool.pick(completion("new")) is b
    assert pool.pick(completion("new"), without=(b,)) is a
    assert pool.pick(completion("new"), without=(a, b)) is c


def test_unavailable_worker_lends_its_prompts_and_gets_them_back():
    """The next best match among the others, or the smallest tree."""
    pool = pool_of(3)
    a, b, c = pool.members
    pool.send(completion("abcdefgh"), to=a)
    pool.send(completion("abcdef--"), to=b)
    pool.send(completion("z"), to=c)

    assert pool.pick(completion("abcdefgh")) is a
    assert pool.pick(completion("abcdefgh"), without=(a,)) is b
    assert pool.pick(completion("abcdefgh"), without=(a, b)) is c
    assert pool.pick(completion("abcdefgh")) is a


def test_one_hot_prefix_does_not_drag_others_off_affinity():
    """One worker is 100 requests ahead: its prompt is moved, everybody else's stay where they are."""
    pool = pool_of(5)
    homes = {}
    for number, worker in enumerate(pool.members):
        prompt = f"{WORDS[number]} conversation"
        pool.send(completion(prompt), to=worker)
        homes[prompt] = worker
    loaded(pool, 100, 1, 2, 3, 0)

    for prompt, home in homes.items():
        picked = {pool.pick(completion(prompt)) for _ in range(10)}
        assert picked == ({pool.members[4]} if home is pool.members[0] else {home})


@pytest.mark.parametrize("count", [2, 5])
@pytest.mark.parametrize("conversations", [32, 64])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_shared_system_prompt_does_not_send_everything_to_one_worker(count, conversations, seed):
    """Sequential, nothing in flight: no worker has more than 1.5 times the mean of conversations."""
    pool, rng = pool_of(count, seed=seed), random.Random(seed)
    system = prose(rng, 300)

    got = collections.Counter(
        pool.send(chat(("system", system), ("user", prose(rng, 20)))).order
        for _ in range(conversations)
    )

    assert len(got) == count
    assert max(got.values()) <= 1.5 * conversations / count


@pytest.mark.parametrize("count", [2, 5])
def test_turns_of_conversations_with_one_system_prompt_stay_together(count):
    """Spread is not all: later turns go where the first went."""
    pool, rng = pool_of(count), random.Random(4)
    system = prose(rng, 300)
    talks = [[("system", system), ("user", prose(rng, 20))] for _ in range(30)]
    homes = [pool.send(chat(*talk)) for talk in talks]
    for _ in range(3):
        for talk, home in zip(talks, homes, strict=True):
            talk += [("assistant", prose(rng, 40)), ("user", prose(rng, 15))]
            assert pool.send(chat(*talk)) is home


@pytest.mark.parametrize("count", [2, 5])
def test_system_prompt_that_few_letters_follow_is_shared_too(count):
    """Texts that differ at each place in three ways only: 81 conversations, and no node has four children."""
    pool, rng = pool_of(count), random.Random(6)
    system = prose(rng, 300)
    endings = [f"{a}{b}{c}{d}" for a in "xyz" for b in "xyz" for c in "xyz" for d in "xyz"]
    rng.shuffle(endings)

    got = collections.Counter(
        pool.send(chat(("system", system), ("user", f"{ending} {prose(rng, 20)}"))).order
        for ending in endings
    )

    assert max(got.values()) <= 1.5 * len(endings) / count


def test_document_that_many_ask_about_stays_in_few_places():
    """20 documents of 6,000 words' letters, 12 questions each, nothing in flight: two copies on average."""
    pool, rng = pool_of(8), random.Random(8)
    documents = [prose(rng, 600) for _ in range(20)]
    places = collections.defaultdict(set)
    for _ in range(12):
        for number, document in enumerate(documents):
            worker = pool.send(completion(f"{document}\n\nQuestion: {prose(rng, 8)}"))
            places[number].add(worker.order)

    assert sum(map(len, places.values())) / len(documents) <= 2


def test_reply_counts_as_matched():
    """It was generated at the same place: a short question with a long answer stays there."""
    pool = pool_of(2)
    a, b = pool.members
    turns = [("user", "hi")]
    pool.send(chat(*turns), to=a)
    pool.send(completion("x"), to=b)

    later = [*turns, ("assistant", "long " * 100), ("user", "thanks")]

    assert pool.pick(chat(*later)) is a
    not_a_reply = [*turns, ("user", "long " * 100), ("user", "thanks")]
    assert pool.pick(chat(*not_a_reply)) is b


def test_reply_counts_as_matched_for_whom_the_beginning_is_known_in_part():
    """Two conversations begin alike, the other's reply is known: ours still was generated here."""
    pool = pool_of(2)
    a, b = pool.members
    turns = [("user", "hi")]
    pool.send(chat(*turns), to=a)
    pool.send(chat(*turns, ("assistant", "Hello!"), ("user", "x")), to=a)
    pool.send(completion("x"), to=b)

    assert pool.pick(chat(*turns, ("assistant", "Hey you. " * 50), ("user", "thanks"))) is a


def test_only_the_reply_right_after_the_known_part_counts():
    """A later one depends on what came in between."""
    pool = pool_of(2)
    a, b = pool.members
    pool.send(chat(("user", "hi")), to=a)
    pool.send(completion("x"), to=b)

    later = [("user", "hi"), ("assistant", "yes"), ("user", "and"), ("assistant", "long " * 100)]

    assert pool.pick(chat(*later)) is b


@pytest.mark.parametrize(
    ("sent", "asked"),
    [
        ({"model": "m", "prompt": "hello"}, {"model": "n", "prompt": "hello"}),
        ({"model": "m", "prompt": "hello"}, {"model": "", "prompt": "hello"}),
        ({"model": "m", "prompt": "AB"}, {"model": "m", "prompt": [65, 66]}),
        ({"model": "m", "prompt": [65, 66]}, {"model": "m", "prompt": "AB"}),
    ],
    ids=["other model", "no model", "text then tokens", "tokens then text"],
)
def test_what_no_worker_can_share_never_meets(sent, asked):
    """Different models; token ids and text."""
    pool = pool_of(2)
    a, b = pool.members
    pool.send(completion(**_arguments(sent)), to=a)
    pool.send(completion("?", model="z"), to=b)

    assert pool.pick(completion(**_arguments(sent))) is a
    assert pool.pick(completion(**_arguments(asked))) is b


def _arguments(fields):
    return {"prompt": fields["prompt"], "model": fields["model"]}


def test_tokens_are_counted_not_their_digits():
    """Four of seven ids are known."""
    pool = pool_of(2)
    a, b = pool.members
    pool.send(completion([1, 100_000, 3, 4, 5, 6, 7]), to=a)
    pool.send(completion([9]), to=b)

    assert pool.pick(completion([1, 100_000, 3, 4, 8, 8, 8])) is a
    assert pool.pick(completion([1, 100_000, 3, 8, 8, 8, 8])) is b


def test_batch_goes_where_most_of_all_its_prompts_is():
    """Summed over the prompts; exactly half of all characters is no match."""
    pool = pool_of(3)
    a, b, c = pool.members
    pool.send(completion(["aaaa", "bbbb"]), to=a)
    pool.send(completion("cccc"), to=b)
    pool.send(completion("z"), to=c)

    assert pool.pick(completion(["aaaa", "bbbb", "cccc"])) is a
    assert pool.pick(completion(["aaaa", "bbbb", "cccc"]), without=(a,)) is c
    assert pool.pick(completion(["cccc", "dddd"])) is c
    assert pool.pick(completion(["cccc", "ddd"])) is b
    assert pool.pick(completion(["aaaa", "", "b"])) is a


def test_batch_of_equals_goes_to_the_lower_load():
    """As a single prompt does."""
    pool = pool_of(2)
    for worker in pool.members:
        pool.send(completion(["aaaa", "bbbb"]), to=worker)
    loaded(pool, 2, 1)

    assert pool.pick(completion(["aaaa", "bbbb"])) is pool.members[1]


@pytest.mark.parametrize(
    "request_",
    [
        Request("GET", "/v1/models", {}, b""),
        Request("POST", "/v1/audio/transcriptions", {}, None),
        Request("POST", "/v1/completions", {}, b"no json", None),
        completion(""),
        completion([]),
    ],
    ids=["no body", "body not read", "no json", "empty prompt", "no tokens"],
)
def test_request_without_a_prompt_goes_to_the_least_loaded(request_):
    """Ties by chance, and nothing is learnt."""
    pool = pool_of(4)
    pool.send(completion("big tree"), to=pool.members[1])
    loaded(pool, 1, 0, 1, 0)

    picked = {pool.pick(request_) for _ in range(40)}

    assert picked == {pool.members[1], pool.members[3]}
    before = sizes(pool)
    pool.send(request_)
    assert sizes(pool) == before
    assert list(pool.policy._tree._roots) == ["c:m"]


@pytest.mark.parametrize(
    ("content_type", "wanted"),
    [
        ("application/json", True),
        ("", True),
        ("text/plain", True),
        ("multipart/form-data; boundary=x", False),
        ("audio/wav", False),
        ("image/png", False),
        ("application/octet-stream", False),
    ],
)
def test_uploads_are_not_asked_for(content_type, wanted):
    """They hold no prompt."""
    assert CacheAware().wants_body({"content-type": content_type} if content_type else {}) is wanted


def test_content_type_is_read_in_any_case():
    """Media types are case-insensitive (RFC 9110, 8.3.1)."""
    assert not CacheAware().wants_body({"content-type": "Multipart/Form-Data; boundary=x"})


def test_ranks_on_one_host_are_workers_of_their_own():
    """Data-parallel ranks share an address, not a cache."""
    pool = pool_of(8, per_host=8)
    assert len({worker.host for worker in pool.members}) == 1
    homes = {}
    for number, worker in enumerate(pool.members):
        prompt = f"{WORDS[number]} " * 5
        homes[prompt] = pool.send(completion(prompt), to=worker)

    for prompt, home in homes.items():
        assert pool.pick(completion(prompt)) is home
    pool.become(pool.members[1:])
    for prompt, home in homes.items():
        assert (pool.pick(completion(prompt)) is home) is (home in pool.members)


@pytest.mark.parametrize(
    "bounds", [{"max_tree_size": 50}, {"max_tree_chars": 2000}], ids=["nodes", "characters"]
)
def test_tree_stays_within_its_bounds_at_every_insert(bounds):
    """Above it, the least recently used go until a tenth is free; the newest prompt stays."""
    pool, rng = pool_of(2, **bounds), random.Random(3)
    a, _ = pool.members
    policy = pool.policy
    dropped = 0
    for _ in range(300):
        prompt, before = prose(rng, 20), policy._tree.node_count(0)
        pool.send(completion(prompt), to=a)
        nodes, characters = policy._tree.node_count(0), policy._tree.characters[0]
        assert nodes <= policy.max_tree_size
        assert characters <= policy.max_tree_chars
        if nodes < before:
            dropped += 1
            assert nodes <= EVICT_TO_RATIO * policy.max_tree_size
            assert characters <= EVICT_TO_RATIO * policy.max_tree_chars
        assert policy._tree.match("c:m", prompt).longest(0b01)[0] == len(prompt)
    assert dropped >= 5


def test_prompt_larger_than_the_bound_is_not_kept():
    """Nothing else could be done; the tree works on."""
    pool = pool_of(2, max_tree_chars=10)
    a, _ = pool.members
    pool.send(completion("short"), to=a)
    pool.send(completion("x" * 50), to=a)

    assert sizes(pool) == [0, 0]
    pool.send(completion("again"), to=a)
    assert pool.pick(completion("again")) is a


def test_trees_that_others_made_grow_are_cut_at_the_interval():
    """Another worker's prompts split our nodes; after the interval ours are back within the bound."""
    pool = pool_of(2, max_tree_size=10, eviction_interval_secs=30)
    a, b = pool.members
    pool.send(completion("abcdefghijklmnopqrstuvwxyz"), to=a)
    for length in range(24, 8, -1):
        pool.send(completion("abcdefghijklmnopqrstuvwxyz"[:length] + "."), to=b)
    assert pool.policy._tree.node_count(0) > 10

    pool.now += 29
    pool.send(completion("z"), to=b)
    assert pool.policy._tree.node_count(0) > 10
    pool.now += 1
    pool.send(completion("z"), to=b)

    assert pool.policy._tree.node_count(0) <= 9


def test_name_of_the_model_counts_towards_the_bound():
    """It is the client's text and is kept: a name of a megabyte must not be free."""
    pool = pool_of(2, max_tree_chars=100_000)
    a, _ = pool.members

    for number in range(30):
        pool.send(completion("x", model=f"{number:02}" + "m" * 50_000), to=a)

    kept = sum(len(space) for space in pool.policy._tree._roots)
    assert kept <= 200_000


def test_worker_that_leaves_is_forgotten_at_once_and_its_slot_used_again():
    """The next one starts empty, and matches nothing of what its forerunner was sent."""
    pool = pool_of(3)
    a, b, c = pool.members
    pool.send(completion("only a knows"), to=a)
    pool.send(completion("all know"), to=b)
    (d,) = fleet(1, first=3)

    pool.become((b, c))
    tree = pool.policy._tree
    assert tree.match("c:m", "only a knows").path == ()
    pool.become((b, c, d))

    assert pool.policy._slots == {1: 1, 2: 2, 3: 0}
    assert sizes(pool) == [8, 0, 0]
    assert pool.pick(completion("only a knows")) in (c, d)
    pool.send(completion("d now"), to=d)
    assert pool.pick(completion("d now")) is d
    assert pool.pick(completion("all know")) is b


def test_all_workers_are_replaced_in_one_step():
    """A new deployment: nothing of the old one is left."""
    pool = pool_of(3)
    for worker in pool.members:
        pool.send(completion("shared"), to=worker)

    pool.become(fleet(3, first=3))

    assert list(pool.policy._tree.nodes()) == []
    assert sizes(pool) == [0, 0, 0]
    assert set(pool.policy._members.values()) == set(pool.members)


def test_request_sent_to_somebody_who_left_is_ignored():
    """It has no slot any more."""
    pool = pool_of(2)
    a, b = pool.members
    pool.become((b,))

    pool.policy.on_sent(a, completion("late"), pool.now)
    pool.policy.on_done(a, pool.now)

    assert sizes(pool) == [0]


def test_smallest_tree_and_loads_are_per_weight():
    """A worker of weight three takes three times as much."""
    pool = pool_of(2, weights=[1.0, 3.0])
    a, b = pool.members
    pool.send(completion("aaaa"), to=a)
    pool.send(completion("b" * 11), to=b)
    assert pool.pick(completion("new")) is b
    pool.send(completion("bb" * 8), to=b)
    assert pool.pick(completion("new")) is a
    # 60 / 3 = 20 above 0: balanced; 120 / 3 = 40: not
    loaded(pool, 0, 60)
    assert pool.pick(completion("b" * 11)) is b
    loaded(pool, 0, 120)
    assert pool.pick(completion("b" * 11)) is a


def test_weights_spread_new_prompts_in_proportion():
    """Characters in the trees as 1 : 2 : 1."""
    pool, rng = pool_of(3, weights=[1.0, 2.0, 1.0]), random.Random(5)

    for number in range(200):
        pool.send(completion(f"{number:03}" + prose(rng, 10)))

    small, big, other = sizes(pool)
    assert big / (small + big + other) == pytest.approx(0.5, abs=0.03)


@pytest.mark.parametrize(
    ("parameter", "value", "message"),
    [
        ("cache_threshold", -0.1, "from 0 to 1"),
        ("cache_threshold", 1.1, "from 0 to 1"),
        ("cache_threshold", float("nan"), "from 0 to 1"),
        ("balance_abs_threshold", -1, ">= 0"),
        ("balance_rel_threshold", 0.9, ">= 1"),
        ("max_tree_size", 0, ">= 1"),
        ("max_tree_chars", 0, ">= 1"),
        ("shared_fan_out", 1, ">= 2"),
        ("eviction_interval_secs", 0, "> 0"),
    ],
)
def test_parameters_out_of_range_are_refused(parameter, value, message):
    """With name and value in the message."""
    with pytest.raises(ValueError, match=f"{parameter} must be {message}, got {value}"):
        CacheAware(**{parameter: value})


def test_parameters_are_those_of_the_documentation():
    """Names and defaults."""
    shown = {
        field.name: field.default
        for field in dataclasses.fields(CacheAware)
        if not field.name.startswith("_")
    }

    assert shown == {
        "cache_threshold": 0.5,
        "balance_abs_threshold": 32,
        "balance_rel_threshold": 1.1,
        "eviction_interval_secs": 30,
        "max_tree_size": 10_000,
        "max_tree_chars": 33_554_432,
        "shared_fan_out": 4,
    }


def test_flushed_policy_knows_its_workers_but_no_prompt():
    """It picks as at the start, and learns again."""
    pool = pool_of(2)
    a, b = pool.members
    pool.send(completion("hello world"), to=a)
    pool.send(completion("hi"), to=b)

    pool.policy.flush()

    assert isinstance(pool.policy, CacheKeeper)
    assert sizes(pool) == [0, 0]
    assert {pool.pick(completion("hello world")) for _ in range(20)} == {a, b}
    pool.send(completion("hello world"), to=b)
    assert pool.pick(completion("hello world")) is b


def test_flushing_between_two_questions_forgets_the_last_match():
    """The router asks again for fallbacks; what it asks about may be gone."""
    pool = pool_of(2)
    a, _ = pool.members
    request = completion("hello world")
    pool.send(request, to=a)
    assert pool.pick(request) is a

    pool.policy.flush()

    assert {pool.pick(request) for _ in range(20)} == set(pool.members)


def test_flushed_policy_follows_its_members():
    """Those that go and come afterwards."""
    pool = pool_of(3)
    pool.policy.flush()

    pool.policy.on_workers(pool.members[1:])
    assert pool.policy._tree.characters.count(0) == 2
    pool.policy.on_workers(pool.members)
    assert sizes(pool) == [0, 0, 0]
