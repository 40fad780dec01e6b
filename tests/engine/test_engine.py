"""The loop: every member once and whole, true counts, a model put back, errors that help."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, MambaConfig, MixtralConfig, T5Config

from engine.families import VOCAB, greedy, make_model, prompts
from infinite_sampling import ConfigError, FinishReason, Member, RolloutConfig, RolloutEngine, SamplingConfig
from infinite_sampling.engine import SlotEvent, UnsupportedModelError
from infinite_sampling.memory import KVShape, plan_memory
from infinite_sampling.model_runner import ModelRunner

POLICIES = ["full", "micro", "fixed-slot", "dynamic-slot"]


@pytest.fixture(scope="module")
def model():
    return make_model("llama")


def run(model, prompt_ids, generations, *, tokenizer=None, config=None, on_event=None, **sampling):
    engine = RolloutEngine(model, tokenizer, RolloutConfig(**(config or {})))
    keys = {k: sampling.pop(k) for k in ("prompt_keys", "member_keys", "lengths") if k in sampling}
    return engine.rollout(prompt_ids, generations, SamplingConfig(**sampling), on_event=on_event, **keys)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("generations", "slots"), [(1, 1), (5, 3), (3, 8), (7, 2)])
def test_every_member_comes_back_once_in_request_order(model, policy, generations, slots):
    rollout = run(model, prompts(3), generations, config={"policy": policy, "num_slots": slots}, max_new_tokens=9)
    assert [len(group) for group in rollout.completions] == [generations] * 3
    for p, group in enumerate(rollout.completions):
        assert [c.prompt_index for c in group] == [p] * generations
        indices = [c.member_index for c in group]
        assert indices == sorted(set(indices))
        if policy != "dynamic-slot":
            assert indices == list(range(generations))


def test_a_group_of_1024_over_a_few_slots(model):
    forced = [[1 + m % 3 for m in range(1024)]]
    rollout = run(model, prompts(1), 1024, config={"num_slots": 64}, max_new_tokens=3, forced_lengths=forced)
    assert [c.num_tokens for c in rollout.completions[0]] == forced[0]
    assert len({tuple(c.token_ids) for c in rollout.completions[0] if c.num_tokens == 3}) > 300


def test_stats_are_counted_in_the_loop(model):
    forced = [[5, 1, 3, 2], [4, 4, 1, 6]]
    events: list[SlotEvent] = []
    rollout = run(
        model, prompts(2), 4, config={"num_slots": 3}, max_new_tokens=6, forced_lengths=forced, on_event=events.append
    )
    stats, total = rollout.stats, sum(map(sum, forced))
    assert [[c.num_tokens for c in group] for group in rollout.completions] == forced
    assert all(c.finish_reason is FinishReason.LENGTH for c in rollout)
    assert stats.num_tokens == total
    assert stats.num_running_steps == sum(event.kind == "step" for event in events)
    assert sum(event.num_active for event in events if event.kind == "step") == total
    assert stats.lower_bound_steps == max(6, -(-total // 3))
    assert stats.mean_active_slots == pytest.approx(total / stats.num_running_steps)
    assert stats.occupancy == pytest.approx(stats.mean_active_slots / 3)
    assert stats.num_prompt_tokens == sum(map(len, prompts(2)))
    assert sum(event.kind == "start" for event in events) == sum(event.kind == "finish" for event in events) == 8
    assert 0 < stats.decode_seconds + stats.sample_seconds + stats.prefill_seconds <= stats.wall_seconds
    assert stats.deterministic is True
    assert stats.num_discarded_tokens == stats.num_recomputed_tokens == stats.num_preemptions == 0


@pytest.mark.parametrize("policy", ["full", "micro", "fixed-slot"])
def test_kv_held_is_what_the_memory_plan_says(model, policy):
    ids = [prompts(1, longest=40)[0]]
    rollout = run(model, ids, 9, config={"policy": policy, "num_slots": 4}, max_new_tokens=20, ignore_eos=True)
    plan = plan_memory(
        KVShape.of(model.config),
        dtype="float32",
        num_generations=9,
        prompt_tokens=len(ids[0]),
        max_new_tokens=20,
        num_slots=9 if policy == "full" else 4,
    )
    assert rollout.stats.peak_kv_bytes == plan.kv_bytes


def test_equal_prompts_are_two_prompts_unless_their_keys_say_otherwise(model):
    [ids] = prompts(1)
    apart = run(model, [ids, ids], 3, max_new_tokens=12, ignore_eos=True)
    assert [c.token_ids for c in apart.completions[0]] != [c.token_ids for c in apart.completions[1]]
    together = run(model, [ids, ids], 3, max_new_tokens=12, ignore_eos=True, prompt_keys=[4, 4])
    assert [c.token_ids for c in together.completions[0]] == [c.token_ids for c in together.completions[1]]


def test_member_keys_name_the_streams(model):
    [ids] = prompts(1)
    whole = run(model, [ids], 4, max_new_tokens=12, ignore_eos=True)
    part = run(model, [ids], 2, max_new_tokens=12, ignore_eos=True, member_keys=[3, 1])
    assert [c.token_ids for c in part.completions[0]] == [whole.completions[0][m].token_ids for m in (3, 1)]


def test_a_call_may_ask_for_a_different_number_of_each_prompt(model):
    rollout = run(model, prompts(3), [2, 1, 3], max_new_tokens=5)
    assert [len(group) for group in rollout.completions] == [2, 1, 3]


def test_dynamic_slot_counts_what_it_drops(model):
    events: list[SlotEvent] = []
    rollout = run(
        model,
        prompts(1),
        6,
        config={"policy": "dynamic-slot", "num_slots": 4},
        max_new_tokens=40,
        on_event=events.append,
    )
    dropped = [event for event in events if event.kind == "drop"]
    assert len(rollout.completions[0]) == 6
    steps = sum(event.num_active for event in events if event.kind == "step")
    assert rollout.stats.num_tokens + rollout.stats.num_discarded_tokens == steps
    assert bool(dropped) == bool(rollout.stats.num_discarded_tokens)


def test_stream_yields_members_as_they_end(model):
    forced = [[6, 1, 3]]
    sampling = SamplingConfig(max_new_tokens=6, forced_lengths=forced)
    stream = RolloutEngine(model, config=RolloutConfig(num_slots=3)).stream(prompts(1), 3, sampling)
    assert [c.num_tokens for c in stream] == [1, 3, 6]


def touched(model) -> list[object]:
    """Everything the engine may switch, as it stands."""
    modules = [(m.training, "forward" in m.__dict__) for m in model.modules()]
    return [modules, model.config._attn_implementation, model.config.use_cache, model.is_activation_checkpointing]


@pytest.mark.parametrize("failure", ["exception", "interrupt", "closed", "none"])
def test_the_model_is_put_back_whatever_happens(failure):
    model = make_model("llama", attn_implementation="eager")
    model.train()
    model.activation_checkpointing_enable()
    model.model.layers[1].eval()
    before = touched(model)
    raised = {"exception": RuntimeError, "interrupt": KeyboardInterrupt}.get(failure)

    def on_event(event: SlotEvent) -> None:
        if raised and event.step == 3:
            raise raised("stop here")

    engine = RolloutEngine(model, config=RolloutConfig(num_slots=2))
    stream = engine.stream(prompts(1), 4, SamplingConfig(max_new_tokens=9, ignore_eos=True), on_event=on_event)
    if raised:
        with pytest.raises(raised):
            list(stream)
    else:
        next(stream)
        assert not model.training and model.config._attn_implementation == "infinite_sampling"
        if failure == "closed":
            stream.close()
        else:
            list(stream)
    assert touched(model) == before
    loss = model(torch.tensor([[3, 4, 5]]), labels=torch.tensor([[3, 4, 5]])).loss
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())


def test_weights_are_live_between_rollouts():
    model = make_model("llama")
    engine = RolloutEngine(model)
    [ids] = prompts(1)
    sampling = SamplingConfig(temperature=0, max_new_tokens=12)
    first = engine.rollout([ids], 1, sampling).completions[0][0].token_ids
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    second = engine.rollout([ids], 1, sampling).completions[0][0].token_ids
    assert first != second == greedy(model, ids, 12)


def test_lora_decodes_with_its_adapter_and_stays_trainable():
    model = get_peft_model(make_model("llama"), LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    [ids] = prompts(1)
    got = run(model, [ids], 1, temperature=0, max_new_tokens=20).completions[0][0].token_ids
    assert got == greedy(model, ids, 20)
    with model.disable_adapter():
        assert greedy(model, ids, 20) != got
    model.train()
    model(input_ids=torch.tensor([ids]), labels=torch.tensor([ids])).loss.backward()
    assert all(p.grad is not None for n, p in model.named_parameters() if "lora" in n)


def test_bfloat16_over_float32_weights_is_autocast():
    model = make_model("llama")
    [ids] = prompts(1, seed=8)
    rollout = run(model, [ids], 4, config={"dtype": "bfloat16"}, max_new_tokens=24, ignore_eos=True)
    gaps = {"autocast": 0.0, "float32": 0.0}
    for completion in rollout:
        tokens = torch.tensor(completion.token_ids)[:, None]
        for name in gaps:
            with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=name == "autocast"):
                logits = model(torch.tensor([ids + completion.token_ids])).logits[0, len(ids) - 1 : -1]
            expected = torch.log_softmax(logits.float(), -1).gather(1, tokens)[:, 0]
            gaps[name] += float((expected - torch.tensor(completion.logprobs)).abs().mean())
    assert gaps["autocast"] < 0.3
    assert next(model.parameters()).dtype == torch.float32


def test_repetition_penalty_and_min_new_tokens_equal_generate(model):
    for ids in prompts(3, seed=2):
        expected = greedy(model, ids, 25, repetition_penalty=1.7, min_new_tokens=12)
        got = run(model, [ids], 2, temperature=0, max_new_tokens=25, repetition_penalty=1.7, min_new_tokens=12)
        assert [c.token_ids for c in got] == [expected] * 2


def test_eos_ends_a_completion_and_is_kept(model):
    [ids] = prompts(1)
    free = run(model, [ids], 1, temperature=0, max_new_tokens=30, ignore_eos=True).completions[0][0].token_ids
    eos = free[7]
    [completion] = run(model, [ids], 1, temperature=0, max_new_tokens=30, eos_token_ids=[VOCAB - 1, eos])
    assert completion.token_ids == free[: free.index(eos) + 1]
    assert completion.finish_reason == FinishReason.EOS == "eos"


class Letters:
    """A tokenizer whose token t is one letter: enough to test stop strings across tokens."""

    def decode(self, token_ids):
        return "".join(chr(ord("a") + t % 26) for t in token_ids)


def test_a_stop_string_ends_a_completion_also_across_tokens(model):
    [ids] = prompts(1)
    free = run(model, [ids], 1, temperature=0, max_new_tokens=30, ignore_eos=True).completions[0][0].token_ids
    text = Letters().decode(free)
    stop = text[9:12]
    [completion] = run(
        model, [ids], 1, tokenizer=Letters(), temperature=0, max_new_tokens=30, stop=[stop], eos_token_ids=[]
    )
    assert completion.token_ids == free[: text.index(stop) + 3]
    assert completion.finish_reason == "stop"


def test_nan_logits_name_prompt_member_and_step():
    model = make_model("llama")
    rows = prompts(2)
    rows[1].append(50)
    rows[0] = [t for t in rows[0] if t != 50] or [3]
    with torch.no_grad():
        model.model.embed_tokens.weight[50] = float("nan")
    with pytest.raises(FloatingPointError, match=r"prompt 1, member 0, token 0 \(running step 0\)"):
        run(model, rows, 1, max_new_tokens=4)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"prompt_ids": [[]]}, "prompt 0 is empty"),
        ({"prompt_ids": [[3], [VOCAB]]}, f"prompt 1 holds token id {VOCAB}"),
        ({"prompt_ids": [[3] * 600]}, "too long"),
        ({"num_generations": 0}, "num_generations must be an integer of at least 1"),
        ({"prompt_keys": [1, 2]}, "prompt_keys"),
        ({"lengths": [[3]]}, "not available in this version"),
        ({"sampling": SamplingConfig(stop=["x"])}, "stop strings need a tokenizer"),
        ({"sampling": SamplingConfig(forced_lengths=[[1, 2]])}, "one length a member"),
    ],
)
def test_bad_arguments_fail_before_any_work(model, arguments, words):
    engine = RolloutEngine(model)
    with pytest.raises(ConfigError, match=words):
        engine.stream(**{"prompt_ids": [[3, 4]], **arguments})


def test_unsupported_models_are_refused_by_name():
    seq2seq = AutoModelForSeq2SeqLM.from_config(
        T5Config(vocab_size=50, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
    )
    mamba = AutoModelForCausalLM.from_config(
        MambaConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, state_size=4, intermediate_size=32)
    )
    tuned = get_peft_model(make_model("llama"), PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"))
    for refused, words in ((seq2seq, "encoder-decoder"), (mamba, "Mamba.*attention"), (tuned, "virtual tokens")):
        with pytest.raises(UnsupportedModelError, match=words):
            RolloutEngine(refused)


def test_recompute_in_one_ragged_forward_has_the_bits_of_decoding(model):
    """The entry that preemption and drafts will use: a slot brings several tokens."""
    from infinite_sampling.kv_pool import KVPool

    runner = ModelRunner(model, RolloutConfig())
    ids, tokens = prompts(1, seed=9)[0], [5 + i % 80 for i in range(150)]
    with runner.attached():
        pools = []
        for _ in range(2):
            pool = KVPool(40, 32, 4, 200)
            pool.pages.hold_prompt(0, len(ids))
            runner.prefill(pool, 0, ids)
            for slot in range(4):
                pool.pages.admit(slot, 0)
                pool.pages.ensure(slot, len(tokens))
            pools.append(pool)
        step_by_step = torch.stack(
            [runner.forward(pools[0], [t, 9, 7], [2, 0, 1], [i, i, i])[0] for i, t in enumerate(tokens)]
        )
        at_once = runner.forward(pools[1], [*tokens, 9, 9], [2] * len(tokens) + [0, 1], [*range(len(tokens)), 0, 0])
    assert torch.equal(step_by_step, at_once[: len(tokens)])


def test_a_member_is_a_pair():
    assert Member(1, 2) == (1, 2)


def test_a_second_stream_of_one_model_is_refused_and_breaks_nothing(model):
    before = touched(model)
    sampling = SamplingConfig(max_new_tokens=5, ignore_eos=True)
    first = RolloutEngine(model).stream(prompts(1), 2, sampling)
    next(first)
    with pytest.raises(RuntimeError, match="already decoding in another rollout"):
        next(RolloutEngine(model).stream(prompts(1), 2, sampling))
    assert len(list(first)) == 1
    assert touched(model) == before


def test_a_failure_while_packing_weights_keeps_its_own_name(model, monkeypatch):
    from infinite_sampling import linear

    before, calls = touched(model), iter(range(100))

    def failing(*args):
        if next(calls) == 3:
            raise MemoryError("no room")
        return lambda x: x

    monkeypatch.setattr(linear, "make_kernel", failing)
    with pytest.raises(MemoryError, match="no room"):
        run(model, prompts(1), 1)
    assert touched(model) == before


def test_the_peak_counts_prompts_also_without_a_decode(model):
    [ids] = prompts(1)
    rollout = run(model, [ids], 2, max_new_tokens=1)
    plan = plan_memory(
        KVShape.of(model.config), dtype="float32", num_generations=2, prompt_tokens=len(ids), max_new_tokens=1
    )
    assert rollout.stats.peak_kv_bytes == plan.kv_bytes > 0


def test_experts_are_decoded_but_not_called_deterministic():
    config = MixtralConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, eos_token_id=1, sliding_window=None,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    [ids] = prompts(1)
    rollout = run(model, [ids], 2, temperature=0, max_new_tokens=12)
    assert [c.token_ids for c in rollout] == [greedy(model, ids, 12)] * 2
    assert rollout.stats.deterministic is False
    with pytest.raises(UnsupportedModelError, match="no plain linear layer"):
        RolloutEngine(model, config=RolloutConfig(dtype="bfloat16"))


def test_weights_on_no_single_device_are_refused():
    with torch.device("meta"):
        model = make_model("llama")
    with pytest.raises(UnsupportedModelError, match="device"):
        RolloutEngine(model)


@pytest.mark.parametrize("heads", [1, 7])
def test_head_sizes_above_64_keep_their_bits(heads):
    model = make_model("llama", head_dim=128, num_attention_heads=2 * heads, hidden_size=56)
    few, many = (run(model, prompts(2), 9, config={"num_slots": n}, max_new_tokens=6, ignore_eos=True) for n in (2, 18))
    assert few.stats.deterministic and many.stats.deterministic
    assert [(c.token_ids, c.logprobs) for c in few] == [(c.token_ids, c.logprobs) for c in many]
