"""From prompts to token ids, and from token ids to groups.

In: prompts as text or conversations, or rows of token ids as TRL repeats them. Out: token ids and
`PromptGroup` records. All checks of prompts are here; nothing here knows a model or a schedule.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import index
from typing import Any

from infinite_sampling.config import ConfigError, check_keys
from infinite_sampling.types import Member, PromptGroup

Prompt = str | list[dict[str, Any]]
"""Plain text, or a conversation: messages with `role` and `content`, both text."""


def encode_prompts(
    prompts: Sequence[Prompt], tokenizer: Any, *, chat_template_kwargs: Mapping[str, Any] | None = None
) -> list[list[int]]:
    """Token ids of each prompt, tokenised as TRL does.

    Text is tokenised with the tokenizer's own special tokens; a conversation is rendered by its
    chat template, up to where the assistant is to speak. `chat_template_kwargs` go to the template.
    Raises ConfigError naming the prompt that is neither, is empty, needs a template that the
    tokenizer lacks, or is refused by it.
    """
    if isinstance(prompts, (str, Mapping)):
        raise ConfigError(f"prompts must be a list of texts or conversations, got {type(prompts).__name__}; wrap it")
    return [_encode(position, prompt, tokenizer, chat_template_kwargs or {}) for position, prompt in enumerate(prompts)]


def _encode(position: int, prompt: Prompt, tokenizer: Any, template_kwargs: Mapping[str, Any]) -> list[int]:
    if isinstance(prompt, str):
        ids = tokenizer(text=prompt)["input_ids"]
    elif problem := conversation_problem(prompt):
        raise ConfigError(
            f"prompt {position} must be text or a non-empty list of messages with 'role' and 'content': {problem}"
        )
    else:
        if not getattr(tokenizer, "chat_template", None):
            raise ConfigError(
                f"prompt {position} is a conversation but the tokenizer has no chat template; "
                "use an instruction-tuned model, set tokenizer.chat_template, or pass plain text"
            )
        try:
            ids = tokenizer.apply_chat_template(
                prompt, add_generation_prompt=True, tokenize=True, return_dict=True, **template_kwargs
            )["input_ids"]
        except Exception as error:  # a template may raise anything
            raise ConfigError(
                f"prompt {position} is refused by the tokenizer's chat template: {error or type(error).__name__}; "
                f"got the roles {', '.join(message['role'] for message in prompt)}"
            ) from error
    if not ids:
        raise ConfigError(f"prompt {position} is empty: it has no tokens to sample from; give it text or drop it")
    return list(ids)


def conversation_problem(prompt: Any) -> str | None:
    """What keeps `prompt` from being a conversation of text messages; None if it is one."""
    if not isinstance(prompt, list) or not prompt:
        return f"got {prompt!r}"
    for number, message in enumerate(prompt):
        if not isinstance(message, Mapping) or "role" not in message or "content" not in message:
            return f"message {number} is {message!r}"
        if not isinstance(message["role"], str):
            return f"the 'role' of message {number} must be text, got {message['role']!r}"
        content = message["content"]
        if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
            blocks = "; join the blocks of text to one" if isinstance(content, list) else ""
            return f"the 'content' of message {number} must be text, got {content!r}{blocks}"
    return None


def check_prompts(
    prompt_ids: Sequence[Sequence[int]],
    *,
    vocab_size: int,
    max_positions: int | None,
    max_new_tokens: int,
    setting: str = "max_new_tokens",
) -> None:
    """Refuse prompts that this model cannot continue by `max_new_tokens` tokens.

    `vocab_size` is the number of rows of the model's embedding; `max_positions` the number of
    positions it knows (None: no limit); `setting` what the user calls `max_new_tokens`. Raises
    ConfigError naming the first empty prompt, the first token outside the vocabulary, or the count of
    prompts that are too long and the first of them.
    """
    for position, ids in enumerate(prompt_ids):
        if not len(ids):
            raise ConfigError(f"prompt {position} is empty: expected at least one token; drop it")
        if min(ids) < 0 or max(ids) >= vocab_size:
            token = next(token for token in ids if not 0 <= token < vocab_size)
            raise ConfigError(
                f"prompt {position} holds token id {token}, outside the vocabulary of {vocab_size} tokens "
                f"(0 to {vocab_size - 1}); tokenise it with this model's own tokenizer"
            )
    if max_positions is None:
        return
    room = max_positions - max_new_tokens
    if room < 1:
        raise ConfigError(
            f"{setting} ({max_new_tokens}) leaves no room for a prompt in the model's {max_positions} positions; "
            f"lower it below {max_positions}"
        )
    too_long = [position for position, ids in enumerate(prompt_ids) if len(ids) > room]
    if too_long:
        first = too_long[0]
        raise ConfigError(
            f"{len(too_long)} of {len(prompt_ids)} prompts are too long: expected at most {room} tokens "
            f"({max_positions} positions minus {setting} {max_new_tokens}), the first is prompt {first} with "
            f"{len(prompt_ids[first])} tokens; lower {setting}, or shorten or drop these prompts"
        )


def group_prompts(
    prompt_ids: Sequence[Sequence[int]],
    num_generations: int | Sequence[int],
    prompt_keys: Sequence[int] | None = None,
    member_keys: Sequence[int] | Sequence[Sequence[int]] | None = None,
) -> list[PromptGroup]:
    """One group a prompt, in order; equal prompts stay two groups.

    `num_generations` is G for all prompts or one a prompt. `prompt_keys` is an int a prompt
    (default 0..P-1); `member_keys` an int a member (default 0..G-1), shared by all prompts, or one
    list a prompt. Raises ConfigError on G < 1, an empty prompt, something that is no token id, or
    keys that are too few, too large or twice in one group.
    """
    num_prompts = len(prompt_ids)
    sizes_P = _per_prompt_sizes(num_generations, num_prompts)
    keys_P = check_keys("prompt_keys", _integers("prompt_keys", prompt_keys), num_prompts)
    member_keys = _integers("member_keys", member_keys)
    member_keys_P: list[Any] = [member_keys] * num_prompts
    if member_keys is not None and any(not isinstance(keys, int) for keys in member_keys):
        if len(member_keys) != num_prompts:
            raise ConfigError(f"member_keys must hold one list for each of {num_prompts} prompts, got {member_keys!r}")
        member_keys_P = [_integers(f"member_keys of prompt {p}", keys) for p, keys in enumerate(member_keys)]
    groups = []
    for position, ids in enumerate(prompt_ids):
        members = check_keys(f"member_keys of prompt {position}", member_keys_P[position], sizes_P[position])
        if len(set(members)) < len(members):
            raise ConfigError(f"member_keys of prompt {position} repeat a key, which would repeat its completion")
        groups.append(PromptGroup(position, keys_P[position], _token_ids(position, ids), members))
    return groups


def _integers(name: str, values: Any) -> list[Any] | None:
    """The values as a list, integers of any library as ints. Raises ConfigError on what is no list."""
    if values is None:
        return None
    try:
        return [_integer(value) for value in values]
    except TypeError:
        raise ConfigError(f"{name} must be a list of integers, got {values!r}") from None


def _integer(value: Any) -> Any:
    try:
        return value if isinstance(value, bool) else index(value)
    except TypeError:
        return value


def _per_prompt_sizes(num_generations: Any, num_prompts: int) -> list[int]:
    try:
        sizes = given = [_integer(size) for size in num_generations]
    except TypeError:
        given = [_integer(num_generations)]
        sizes = given * num_prompts
    if len(sizes) != num_prompts:
        raise ConfigError(f"num_generations must be one int or one for each of {num_prompts} prompts, got {sizes!r}")
    for size in given:
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ConfigError(f"num_generations must be an integer of at least 1, got {size!r}")
    return sizes


def _token_ids(position: int, ids: Iterable[Any]) -> tuple[int, ...]:
    try:
        token_ids = tuple(index(token) for token in ids)
    except TypeError as error:
        raise ConfigError(f"prompt {position} must be a list of token ids (ints), got {ids!r}: {error}") from error
    if not token_ids:
        raise ConfigError(f"prompt {position} is empty: expected at least one token; drop it")
    return token_ids


def group_rows(
    rows_prompt_ids: Sequence[Sequence[int]], global_rows: Sequence[int], group_size: int
) -> tuple[list[PromptGroup], list[Member]]:
    """Groups of any rows of a batch, and for each row the member that answers it.

    A row's identity is its place in the whole batch: prompt key `global_row // group_size`, member
    key `global_row % group_size`. Rows share a group, and so the prompt's KV, only if their prompt
    key and their tokens are equal: after a tool turn the members of one group differ. Row r is
    answered by `completions[members[r].prompt_index][members[r].member_index]`.
    Raises ConfigError on a group size below 1, a negative or repeated row, or an empty prompt.
    """
    if isinstance(group_size, bool) or not isinstance(group_size, int) or group_size < 1:
        raise ConfigError(f"group_size must be an integer of at least 1, got {group_size!r}")
    if len(global_rows) != len(rows_prompt_ids):
        raise ConfigError(f"global_rows must name each of {len(rows_prompt_ids)} rows, got {len(global_rows)}")
    if any(row < 0 for row in global_rows) or len(set(global_rows)) < len(global_rows):
        raise ConfigError(f"global rows must be distinct and not negative, got {list(global_rows)!r}")
    positions: dict[tuple[int, tuple[int, ...]], int] = {}
    keys_P: list[list[int]] = []
    members = []
    for row, (global_row, ids) in enumerate(zip(global_rows, rows_prompt_ids, strict=True)):
        prompt_key, member_key = divmod(global_row, group_size)
        position = positions.setdefault((prompt_key, _token_ids(row, ids)), len(positions))
        if position == len(keys_P):
            keys_P.append([])
        members.append(Member(position, len(keys_P[position])))
        keys_P[position].append(member_key)
    groups = [
        PromptGroup(position, prompt_key, ids, tuple(keys_P[position]))
        for (prompt_key, ids), position in positions.items()
    ]
    return groups, members
