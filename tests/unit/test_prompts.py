"""Prompts become token ids, and rows become groups whose identity is their place."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinite_sampling.config import ConfigError
from infinite_sampling.models import load_tokenizer
from infinite_sampling.prompts import check_prompts, encode_prompts, group_prompts, group_rows
from infinite_sampling.types import Member, PromptGroup

QUESTION = [{"role": "user", "content": "What is 17 + 5?"}]


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("smollm2")


def test_text_is_tokenised_as_it_is(tokenizer):
    (ids,) = encode_prompts(["Two and\n\n 2 make"], tokenizer)
    assert tokenizer.decode(ids) == "Two and\n\n 2 make"


def test_conversation_is_rendered_up_to_the_answer(tokenizer):
    plain, chat = encode_prompts(["What is 17 + 5?", QUESTION], tokenizer)
    assert tokenizer.decode(chat).endswith("<|im_start|>user\nWhat is 17 + 5?<|im_end|>\n<|im_start|>assistant\n")
    assert len(chat) > len(plain)


def test_encoding_is_what_trl_feeds_its_model(tokenizer):
    batch = tokenizer.apply_chat_template(
        conversation=[QUESTION, QUESTION], add_generation_prompt=True, tokenize=True, return_dict=True
    )["input_ids"]
    assert encode_prompts([QUESTION, QUESTION], tokenizer) == batch
    assert encode_prompts(["one", "two words"], tokenizer) == tokenizer(text=["one", "two words"])["input_ids"]


def test_template_arguments_reach_the_template(tokenizer):
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}{{ mood }}"
    (ids,) = encode_prompts([QUESTION], tokenizer, chat_template_kwargs={"chat_template": template, "mood": " Gladly"})
    assert tokenizer.decode(ids) == "What is 17 + 5? Gladly"


def test_conversation_without_a_template_is_refused():
    tokenizer = load_tokenizer("smollm2")
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match="prompt 1 is a conversation but the tokenizer has no chat template"):
        encode_prompts(["plain", QUESTION], tokenizer)


@pytest.mark.parametrize("bad", [[], 7, None, ["text"], [{"content": "no role"}], [{"role": "user"}]])
def test_what_is_no_prompt_is_refused_by_its_index(tokenizer, bad):
    with pytest.raises(ConfigError, match="prompt 1 must be text or a non-empty list of messages"):
        encode_prompts(["fine", bad], tokenizer)


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ({"role": "user", "content": 5}, "the 'content' of message 1 must be text, got 5"),
        ({"role": "user", "content": None}, "the 'content' of message 1 must be text, got None"),
        ({"role": "user", "content": [{"type": "text", "text": "Hi"}]}, "the 'content' .* join the blocks"),
        ({"role": 5, "content": "Hi"}, "the 'role' of message 1 must be text, got 5"),
    ],
)
def test_a_message_that_is_no_text_is_refused_by_its_prompt(tokenizer, message, problem):
    with pytest.raises(ConfigError, match=f"prompt 2 must be text or .*: {problem}"):
        encode_prompts(["fine", QUESTION, [*QUESTION, message]], tokenizer)


def test_a_call_of_a_tool_needs_no_content(tokenizer):
    call = {"role": "assistant", "content": None, "tool_calls": [{"type": "function"}]}
    template = "{% for m in messages %}{{ m['content'] or 'call' }}{% endfor %}"
    (ids,) = encode_prompts([[*QUESTION, call]], tokenizer, chat_template_kwargs={"chat_template": template})
    assert tokenizer.decode(ids) == "What is 17 + 5?call"


def test_a_conversation_that_the_template_refuses_is_named(tokenizer):
    template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ConfigError, match=r"prompt 1 is refused by .* roles must alternate; got the roles user"):
        encode_prompts(["plain", QUESTION], tokenizer, chat_template_kwargs={"chat_template": template})


def test_empty_prompt_is_refused_by_its_index(tokenizer):
    with pytest.raises(ConfigError, match="prompt 2 is empty"):
        encode_prompts(["a", "b", ""], tokenizer)


def test_one_text_for_a_list_is_refused(tokenizer):
    with pytest.raises(ConfigError, match="wrap it"):
        encode_prompts("not a list", tokenizer)


def test_prompts_that_fit_exactly_pass():
    check_prompts([[0, 9], [1] * 12], vocab_size=10, max_positions=16, max_new_tokens=4)
    check_prompts([[1] * 1000], vocab_size=10, max_positions=None, max_new_tokens=4)


def test_long_prompts_are_counted_and_the_first_named():
    prompts = [[1], [1] * 13, [1] * 12, [1] * 40]
    with pytest.raises(ConfigError, match=r"2 of 4 prompts .* at most 12 tokens .* first is prompt 1 with 13 tokens"):
        check_prompts(prompts, vocab_size=10, max_positions=16, max_new_tokens=4)


def test_more_new_tokens_than_positions_are_refused():
    with pytest.raises(ConfigError, match=r"max_new_tokens \(16\) leaves no room"):
        check_prompts([[1]], vocab_size=10, max_positions=16, max_new_tokens=16)


@pytest.mark.parametrize("token", [-1, 10])
def test_token_outside_the_vocabulary_is_named(token):
    with pytest.raises(ConfigError, match=f"prompt 1 holds token id {token}, outside the vocabulary of 10"):
        check_prompts([[1], [3, token, 2]], vocab_size=10, max_positions=16, max_new_tokens=4)


def test_empty_ids_are_refused():
    with pytest.raises(ConfigError, match="prompt 1 is empty"):
        check_prompts([[1], []], vocab_size=10, max_positions=16, max_new_tokens=4)
    with pytest.raises(ConfigError, match="prompt 1 is empty"):
        group_prompts([[1], []], 2)


def test_equal_prompts_stay_two_groups_with_their_own_keys():
    assert group_prompts([[5, 6], [5, 6]], 3) == [
        PromptGroup(0, 0, (5, 6), (0, 1, 2)),
        PromptGroup(1, 1, (5, 6), (0, 1, 2)),
    ]


def test_group_sizes_and_keys_can_be_given_for_each_prompt():
    groups = group_prompts([[1], [2]], [1, 2], prompt_keys=[7, 3], member_keys=[[4], [9, 8]])
    assert groups == [PromptGroup(0, 7, (1,), (4,)), PromptGroup(1, 3, (2,), (9, 8))]
    shared = group_prompts([[1], [2]], 2, member_keys=[6, 5])
    assert [group.member_keys for group in shared] == [(6, 5), (6, 5)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_generations": 0}, "num_generations must be an integer of at least 1, got 0"),
        ({"num_generations": True}, "at least 1, got True"),
        ({"num_generations": [2, -1]}, "at least 1, got -1"),
        ({"num_generations": [2]}, "one for each of 2 prompts"),
        ({"num_generations": 2, "prompt_keys": [1]}, "prompt_keys must hold 2 keys, got 1"),
        ({"num_generations": 2, "member_keys": [1]}, "member_keys of prompt 0 must hold 2 keys, got 1"),
        ({"num_generations": 2, "member_keys": [3, 3]}, "repeat a key"),
        ({"num_generations": 2, "member_keys": [[0, 1]]}, "one list for each of 2 prompts"),
        ({"num_generations": 2, "prompt_keys": [0, 2**32]}, "below 2\\*\\*32"),
        ({"num_generations": 2.0}, "num_generations must be an integer of at least 1, got 2.0"),
        ({"num_generations": None}, "num_generations must be an integer of at least 1, got None"),
        ({"num_generations": [2, 2.5]}, "num_generations must be an integer of at least 1, got 2.5"),
        ({"num_generations": 2, "prompt_keys": 5}, "prompt_keys must be a list of integers, got 5"),
        ({"num_generations": 2, "prompt_keys": [1.5, 2]}, "each of prompt_keys must be an integer"),
        ({"num_generations": 2, "member_keys": 5}, "member_keys must be a list of integers, got 5"),
        (
            {"num_generations": 2, "member_keys": [[0, 1], 5]},
            "one list for each|of prompt 1 must be a list of integers",
        ),
    ],
)
def test_wrong_sizes_and_keys_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        group_prompts([[1], [2]], **arguments)


def test_sizes_and_keys_can_be_numpys():
    expected = group_prompts([[1], [2]], 2, prompt_keys=[7, 3], member_keys=[6, 5])
    for size in (np.int64(2), np.array([2, 2])):
        for member_keys in (np.array([6, 5]), np.array([[6, 5], [6, 5]])):
            groups = group_prompts(np.array([[1], [2]]), size, prompt_keys=np.array([7, 3]), member_keys=member_keys)
            assert groups == expected
            assert all(type(key) is int for group in groups for key in (group.prompt_key, *group.member_keys))


def test_group_size_below_one_is_refused_without_prompts():
    with pytest.raises(ConfigError, match="at least 1, got 0"):
        group_prompts([], 0)


@pytest.mark.parametrize("ids", [["a"], [1.5], 3])
def test_what_is_no_token_id_is_refused(ids):
    with pytest.raises(ConfigError, match="prompt 0 must be a list of token ids"):
        group_prompts([ids], 1)


def test_groups_that_straddle_processes_keep_their_keys():
    groups, members = group_rows([[1], [2], [2], [2], [3]], global_rows=range(2, 7), group_size=3)
    assert groups == [PromptGroup(0, 0, (1,), (2,)), PromptGroup(1, 1, (2,), (0, 1, 2)), PromptGroup(2, 2, (3,), (0,))]
    assert members == [Member(0, 0), Member(1, 0), Member(1, 1), Member(1, 2), Member(2, 0)]


def test_equal_neighbouring_prompts_are_told_apart_by_their_rows():
    groups, _ = group_rows([[4]] * 4, global_rows=range(4), group_size=2)
    assert [(group.prompt_key, group.member_keys) for group in groups] == [(0, (0, 1)), (1, (0, 1))]


def test_rows_of_one_group_that_differ_after_a_tool_turn_keep_their_keys():
    groups, members = group_rows([[1, 8], [1, 9], [1, 8]], global_rows=[4, 5, 7], group_size=4)
    assert groups == [PromptGroup(0, 1, (1, 8), (0, 3)), PromptGroup(1, 1, (1, 9), (1,))]
    assert members == [Member(0, 0), Member(1, 0), Member(0, 1)]


@pytest.mark.parametrize(
    ("rows", "size", "message"),
    [([0], 0, "at least 1"), ([-1], 2, "not negative"), ([1, 1], 2, "distinct"), ([0, 1, 2], 2, "each of")],
)
def test_impossible_rows_are_refused(rows, size, message):
    with pytest.raises(ConfigError, match=message):
        group_rows([[1]] * min(len(rows), 2), rows, size)


@given(
    prompts=st.lists(st.sampled_from([(1,), (2,), (1, 2)]), min_size=1, max_size=6),
    size=st.integers(1, 5),
    cuts=st.tuples(st.integers(0, 30), st.integers(0, 30)),
)
def test_every_cut_of_the_batch_names_the_same_streams(prompts, size, cuts):
    rows = [ids for ids in prompts for _ in range(size)]
    start, stop = sorted(min(cut, len(rows)) for cut in cuts)
    groups, members = group_rows(rows[start:stop], range(start, stop), size)
    for global_row, member in zip(range(start, stop), members, strict=True):
        group = groups[member.prompt_index]
        assert group.prompt_ids == rows[global_row]
        assert (group.prompt_key, group.member_keys[member.member_index]) == divmod(global_row, size)
    assert sorted(members) == members and len(set(members)) == len(members)
    assert [group.prompt_index for group in groups] == list(range(len(groups)))
