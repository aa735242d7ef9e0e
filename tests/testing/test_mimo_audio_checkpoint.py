# SPDX-License-Identifier: Apache-2.0
"""The generator of random MiMo-Audio checkpoints."""

import argparse
import ast
import hashlib
import inspect
import json
import re
import string
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor
from transformers import DynamicCache, Qwen2Config, Qwen2Model

from vllm_omni_audio_perf.cli import make_checkpoint as cli_make_checkpoint
from vllm_omni_audio_perf.testing import checkpoint_writing
from vllm_omni_audio_perf.testing import mimo_audio_checkpoint as generator
from vllm_omni_audio_perf.testing.mimo_audio_checkpoint import (
    AUDIO_TOKENIZER_FOLDER,
    MARKER_FILE,
    STEPS,
    make_checkpoint,
    usage,
)

MEDIA = Path(__file__).parents[2] / "examples/media"

TEXT_END, GROUP, SPEECH_START, SPEECH_END, SPEECH_TEXT_END = 151645, 151667, 151670, 151671, 151672
CODEBOOK_SIZES = [1024, 1024, 128, 128, 128, 128, 128, 128]
CHARACTERS = set(string.ascii_letters + string.digits + string.punctuation + " ") - {"/"}

# The names in the published repository that upstream and transformers read, apart from README, LICENSE and
# .gitattributes; what transformers 5 adds (the template as a file of its own); and the marker.
FILES = {
    "added_tokens.json",
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "merges.txt",
    "model.safetensors",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    MARKER_FILE,
    f"{AUDIO_TOKENIZER_FOLDER}/config.json",
    f"{AUDIO_TOKENIZER_FOLDER}/model.safetensors",
}

USER = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
SPEAK = USER + "<|sostm|>"
THINK = USER + "<think>\n"
WRITE = USER + "<think>\n\n</think>\n"


@pytest.fixture(scope="session")
def folder(mimo_audio_checkpoint: Path) -> Path:
    """A checkpoint with seed 0."""
    return mimo_audio_checkpoint


@pytest.fixture(scope="session")
def tokenizer(folder: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(folder)


def files(folder: Path) -> dict[str, str]:
    """Checksums by relative path."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


def random_codes(length: int, seed: int) -> Tensor:
    source = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randint(size, (length,), generator=source) for size in CODEBOOK_SIZES])


# --------------------------------------------------------------------------------------------------------------------
# Files
# --------------------------------------------------------------------------------------------------------------------


def test_file_set(folder: Path) -> None:
    assert set(files(folder)) == FILES
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) < 100e6
    modes = {path.stat().st_mode & 0o777 for path in folder.rglob("*") if path.is_file()}
    assert len(modes) == 1


def test_config_has_the_numbers_that_upstream_relies_on(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    assert (config["architectures"], config["model_type"]) == (["MiMoAudioModel"], "qwen2")
    assert (config["vocab_size"], config["max_position_embeddings"], config["head_dim"]) == (151680, 8192, 128)
    assert config["speech_vocab_size"] == "1025-1025-129-129-129-129-129-129"
    assert config["speech_zeroemb_idx"] == "1024-1024-128-128-128-128-128-128"
    assert config["delay_pattern"] == "0-1-2-3-4-5-6-7"
    assert (config["group_size"], config["audio_channels"]) == (4, 8)
    audio = json.loads((folder / AUDIO_TOKENIZER_FOLDER / "config.json").read_text())
    assert audio["codebook_size"] == CODEBOOK_SIZES + [128] * 12
    assert (audio["num_quantizers"], audio["avg_pooler"], audio["stride_size"]) == (20, 2, 2)
    assert (audio["nfft"], audio["window_size"], audio["hop_length"], audio["sampling_rate"]) == (960, 960, 240, 24000)
    assert audio["vocoder_attn_window_size"] == [40, 10]


def test_every_number_is_finite(folder: Path) -> None:
    for file, dtype in (("", torch.bfloat16), (AUDIO_TOKENIZER_FOLDER, torch.float32)):
        for name, weight in load_file(folder / file / "model.safetensors").items():
            assert weight.dtype == dtype, name
            assert weight.isfinite().all(), name


def test_same_seed_same_bytes(folder: Path, tmp_path: Path) -> None:
    random_state = torch.get_rng_state()
    again = make_checkpoint(tmp_path / "again")
    assert torch.equal(torch.get_rng_state(), random_state)
    assert files(again) == files(folder)


def test_other_seed_other_weights(folder: Path, tmp_path: Path) -> None:
    other = make_checkpoint(tmp_path / "other", seed=1)
    # What finds the order of a reply, and what is no parameter.
    kept = r"model\.layers\.[0-5]\.self_attn\..*|.*\.istft\.window|.*\._codebook\.(inited|cluster_size)"
    for file in ("", AUDIO_TOKENIZER_FOLDER):
        a, b = (load_file(path / file / "model.safetensors") for path in (folder, other))
        assert [name for name in a if torch.equal(a[name], b[name]) and not re.fullmatch(kept, name)] == []


def test_tokenizer(tokenizer: Any) -> None:
    text = "<|im_start|>user\nGrüße, 世界! <|sosp|><|empty|><|eosp|><|im_end|>\n<|sostm|>a<|eot|><|eostm|><tool_call>"
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids, skip_special_tokens=True) == "user\nGrüße, 世界! \na<tool_call>"
    names = ["<|sosp|>", "<|eosp|>", "<|empty|>", "<|Human|>", "<|SpeechLM|>", "<|sostm|>", "<|eostm|>", "<|eot|>"]
    assert tokenizer.convert_tokens_to_ids(names) == list(range(151665, 151673))
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (TEXT_END, 151643)
    # No hole: `tokenizers` prints a warning for each.
    assert sorted(tokenizer.get_vocab().values()) == list(range(151673))


def test_tokenizer_loads_without_a_warning(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    transformers.utils.logging.enable_propagation()
    try:
        transformers.AutoTokenizer.from_pretrained(folder)
    finally:
        transformers.utils.logging.disable_propagation()
    assert not caplog.records


def test_chat_template(tokenizer: Any) -> None:
    messages = [
        {"role": "system", "content": "Speak."},
        {"role": "user", "content": [{"type": "text", "text": "Repeat: "}, {"type": "audio", "audio": "a.wav"}]},
    ]
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\nSpeak.<|im_end|>\n"
        "<|im_start|>user\nRepeat: <|sosp|><|empty|><|eosp|><|im_end|>\n"
        "<|im_start|>assistant\n<|sostm|>"
    )


# --------------------------------------------------------------------------------------------------------------------
# Language model
# --------------------------------------------------------------------------------------------------------------------


class Talker:
    """The language model in slow, obvious PyTorch: what vLLM-Omni's stage 0 computes for one request."""

    def __init__(self, folder: Path) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        self.weights = load_file(folder / "model.safetensors")
        self.model = self._decoder("model.")
        local: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}
        self.local = self._decoder("local_transformer.", **local, num_hidden_layers=2, intermediate_size=128)
        self.input_local = self._decoder(
            "input_local_transformer.", **local, num_hidden_layers=1, intermediate_size=256
        )

    def _decoder(self, prefix: str, **sizes: Any) -> Qwen2Model:
        options = {"_attn_implementation": "eager", **self.config, **sizes}
        model = Qwen2Model(Qwen2Config(**options))
        weights = {name.removeprefix(prefix): value for name, value in self.weights.items() if name.startswith(prefix)}
        if "embed_tokens.weight" not in weights:
            model.embed_tokens = None
        model.load_state_dict(weights, strict=True)
        return model.to(torch.bfloat16).eval()

    def embed_group(self, codes: Tensor) -> Tensor:
        """The embedding (1, width) of a group of codes (8, 4)."""
        frames = sum(self.weights[f"speech_embeddings.{index}.weight"][row] for index, row in enumerate(codes))
        everything = torch.zeros(1, 1, 4, 4, dtype=torch.bfloat16)
        states = self.input_local(inputs_embeds=frames[None], attention_mask=everything).last_hidden_state
        return states.reshape(1, -1) @ self.weights["speech_group_downcast.weight"].T

    def speak(self, state: Tensor) -> Tensor:
        """The group of codes (8, 4) of a state (width,)."""
        codes, cache = torch.zeros(8, 4, dtype=torch.long), DynamicCache()
        embeds = (self.weights["hidden_states_downcast.weight"] @ state).view(1, 1, -1)
        for step in range(4 + 7):
            state = self.local(inputs_embeds=embeds, past_key_values=cache, use_cache=True).last_hidden_state[0, -1]
            embeds = torch.zeros_like(embeds)
            for channel in range(max(0, step - 3), min(8, step + 1)):
                scores = self.weights[f"local_transformer_lm_heads.{channel}.weight"] @ state
                code = int(scores[:-1].argmax())
                codes[channel, step - channel] = code
                embeds += self.weights[f"speech_embeddings.{channel}.weight"][code]
        return codes

    @torch.no_grad()
    def reply(
        self, ids: list[int], *, seed: int | None, limit: int = 400, heard: Tensor | None = None
    ) -> tuple[list[int], Tensor]:
        """Answer with the sampling parameters of upstream's YAML; without a seed, greedily, as upstream's example.

        Args:
            ids: the prompt.
            seed: of the sampling.
            limit: of the reply in tokens.
            heard: groups of codes (groups, 8, 4) in the place of the prompt's `<|empty|>`.

        Returns:
            The reply's ids, and its groups of codes (groups, 8, 4).
        """
        source = torch.Generator().manual_seed(seed or 0)
        embeds = self.model.get_input_embeddings()(torch.tensor([ids]))
        for position, codes in zip(
            (i for i, token in enumerate(ids) if token == GROUP), [] if heard is None else heard, strict=True
        ):
            embeds[0, position] = self.embed_group(codes)
        seen, reply, groups, cache = set(ids), [], [], DynamicCache()
        while len(reply) < limit:
            state = self.model(inputs_embeds=embeds, past_key_values=cache, use_cache=True).last_hidden_state[0, -1]
            logits = (self.weights["lm_head.weight"] @ state).float()
            likeliest = int(logits.argmax())  # upstream's model speaks if this is a group, whatever is sampled
            penalized = torch.tensor(sorted(seen))
            logits[penalized] *= torch.where(logits[penalized] > 0, 1 / 1.1, 1.1)
            token = int(logits.argmax())
            if seed is not None:
                values, candidates = (logits / 0.6).topk(50)
                probabilities = values.softmax(-1)
                probabilities[probabilities.cumsum(-1) - probabilities > 0.95] = 0
                token = int(candidates[torch.multinomial(probabilities, 1, generator=source)])
            reply.append(token)
            seen.add(token)
            if token in (SPEECH_END, TEXT_END):
                break
            assert (token == GROUP) == (likeliest == GROUP) or likeliest == SPEECH_END
            if likeliest == GROUP:
                groups.append(self.speak(state))
            if token == GROUP:
                embeds = self.embed_group(groups[-1])[None]
            else:
                embeds = self.model.get_input_embeddings()(torch.tensor([[token]]))
        return reply, torch.stack(groups) if groups else torch.zeros(0, 8, 4, dtype=torch.long)


@pytest.fixture(scope="session")
def talker(folder: Path) -> Talker:
    return Talker(folder)


def symbols(reply: list[int], tokenizer: Any) -> str:
    """One symbol a token: a for a character, _ for a group, the rest by its last letters."""
    names = {GROUP: "_", SPEECH_START: "[", SPEECH_TEXT_END: "|", SPEECH_END: "]", TEXT_END: "."}
    others = {token for token in reply if token not in names}
    assert {tokenizer.decode([token]) for token in others} <= CHARACTERS
    return "".join(names.get(token, "a") for token in reply)


SPEECH = r"a{5,6}(_{5}a{5})*(_{5}a{1,5})?(_{5})?\|_+\]"


def test_only_known_weights(talker: Talker) -> None:
    shapes = {
        "lm_head.weight": (151680, 128),
        "speech_group_downcast.weight": (128, 4 * 64),
        "hidden_states_downcast.weight": (64, 128),
    }
    for index, size in enumerate(CODEBOOK_SIZES):
        shapes[f"speech_embeddings.{index}.weight"] = (size + 1, 64)
        shapes[f"local_transformer_lm_heads.{index}.weight"] = (size + 1, 64)
    decoders = ("model.", "local_transformer.", "input_local_transformer.")
    assert {k: tuple(v.shape) for k, v in talker.weights.items() if not k.startswith(decoders)} == shapes


@pytest.mark.parametrize("seed", [0, 1, 2, None])
def test_speech_has_characters_and_groups_in_turn_and_ends(talker: Talker, tokenizer: Any, seed: int | None) -> None:
    prompt = tokenizer(SPEAK.format("Read this content out loud: The weather is so nice today.")).input_ids
    reply, codes = talker.reply(prompt, seed=seed)
    assert re.fullmatch(SPEECH, symbols(reply, tokenizer))
    assert 20 <= len(codes) <= 100
    assert 15 <= sum(token < 256 for token in reply) <= 100


def test_codes_vary(talker: Talker, tokenizer: Any) -> None:
    _, codes = talker.reply(tokenizer(SPEAK.format("Hello.")).input_ids, seed=0)
    assert len({tuple(group.flatten().tolist()) for group in codes}) == len(codes)
    rows = codes.transpose(0, 1).flatten(1)
    for row, size in zip(rows, CODEBOOK_SIZES, strict=True):
        assert row.max() < size
        assert len(row.unique()) > 20
    _, others = talker.reply(tokenizer(SPEAK.format("Good night.")).input_ids, seed=0, limit=11)
    assert len(others) == 5
    assert not torch.equal(codes[:5], others)


def test_a_short_limit_is_kept(talker: Talker, tokenizer: Any) -> None:
    reply, codes = talker.reply(tokenizer(SPEAK.format("Hello.")).input_ids, seed=0, limit=16)
    assert re.fullmatch("a{5,6}_{5}a{5,6}", symbols(reply, tokenizer))
    assert len(codes) == 5


@pytest.mark.parametrize("seed", [0, 1, None])
def test_after_thinking_it_writes_only(talker: Talker, tokenizer: Any, seed: int | None) -> None:
    reply, _ = talker.reply(tokenizer(WRITE.format("Where to go in China?")).input_ids, seed=seed)
    assert re.fullmatch(r"a{20,160}\.", symbols(reply, tokenizer))


@pytest.mark.parametrize("prompt", [THINK, USER])
def test_otherwise_it_writes_before_it_speaks(talker: Talker, tokenizer: Any, prompt: str) -> None:
    reply, _ = talker.reply(tokenizer(prompt.format("Say it happily/slowly.")).input_ids, seed=0)
    assert re.fullmatch(r"a{20,160}\[" + SPEECH, symbols(reply, tokenizer))


@pytest.mark.parametrize("seed", [0, 1])
def test_it_hears(talker: Talker, tokenizer: Any, seed: int) -> None:
    """A dialogue in which the user spoke, the model spoke, and the user spoke again."""
    heard = "<|sosp|>" + "<|empty|>" * 15 + "<|eosp|>"
    earlier = USER.format(heard) + "<|sostm|>Sunny" + "<|empty|>" * 5 + "<|eot|><|empty|><|eostm|><|im_end|>\n"
    ids = tokenizer(earlier + SPEAK.format(heard)).input_ids
    codes = torch.stack([random_codes(4, index) for index in range(36)])
    reply, said = talker.reply(ids, seed=seed, heard=codes)
    assert re.fullmatch(SPEECH, symbols(reply, tokenizer))
    codes[-1] = random_codes(4, 99)
    _, other = talker.reply(ids, seed=seed, heard=codes, limit=11)
    assert len(other) == 5
    assert not torch.equal(said[:5], other)


def test_lost_audio_leaves_the_order_of_a_reply(
    talker: Talker, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Upstream embeds a recording as zeros if it reads the prompt in a step in which another request speaks."""
    embed, lost = talker.embed_group, iter(range(30))
    monkeypatch.setattr(talker, "embed_group", lambda codes: embed(codes) * (next(lost, None) is None))
    ids = tokenizer(SPEAK.format("<|sosp|>" + "<|empty|>" * 30 + "<|eosp|>")).input_ids
    reply, _ = talker.reply(ids, seed=0, heard=torch.stack([random_codes(4, index) for index in range(30)]))
    assert re.fullmatch(SPEECH, symbols(reply, tokenizer))


# --------------------------------------------------------------------------------------------------------------------
# Audio tokenizer, with upstream's classes
# --------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def codec(folder: Path) -> Any:
    """Upstream's worker around the audio tokenizer."""
    pytest.importorskip("vllm_omni")
    from vllm_omni.model_executor.models.mimo_audio.mimo_audio_code2wav import get_tokenizer_worker

    path = str(folder / AUDIO_TOKENIZER_FOLDER)
    return get_tokenizer_worker(torch.device("cpu"), path, path)


@pytest.fixture(scope="session")
def recording() -> Tensor:
    """A voice (samples,) at 16 kHz."""
    soundfile = pytest.importorskip("soundfile")
    return torch.from_numpy(soundfile.read(MEDIA / "sea.flac", dtype="float32")[0])


def decibels(sound: Tensor) -> float:
    return 10 * float(sound.square().mean().log10())


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


def test_upstreams_tokenizer_loads_every_weight(codec: Any, folder: Path) -> None:
    from vllm_omni.model_executor.models.mimo_audio.modeling_audio_tokenizer import MiMoAudioTokenizer

    path = folder / AUDIO_TOKENIZER_FOLDER
    model, info = MiMoAudioTokenizer.from_pretrained(path, output_loading_info=True)
    assert not any(info.values())
    saved = load_file(path / "model.safetensors")
    loaded = model.state_dict()
    assert set(saved) == set(loaded)
    assert all(torch.equal(saved[name], loaded[name]) for name in saved)
    assert (codec.config.group_size, codec.config.audio_channels) == (4, 8)


def test_upstream_finds_its_tokens(codec: Any, tokenizer: Any) -> None:
    from vllm_omni.model_executor.models.mimo_audio.mimo_audio_code2wav import MiMoAudioCodes

    assert MiMoAudioCodes.from_tokenizer(tokenizer) == MiMoAudioCodes(
        sosp=151665,
        eosp=151666,
        sostm=SPEECH_START,
        eostm=SPEECH_END,
        im_end=TEXT_END,
        pad=151643,
        eot=SPEECH_TEXT_END,
        empty=GROUP,
    )


@pytest.mark.parametrize(("length", "seed"), [(4, 0), (4, 3), (12, 1), (160, 2)])
def test_sound_has_the_level_of_speech(codec: Any, length: int, seed: int) -> None:
    sound = codec.decode(random_codes(length, seed))
    assert sound.shape == (length * 960,)
    assert sound.isfinite().all()
    assert sound.abs().max() < 0.95
    assert sound.mean().abs() < 0.02
    windows = sound[: len(sound) // 1920 * 1920].view(-1, 1920)  # 80 ms
    assert all(-30 < decibels(window) < -14 for window in windows)


def test_sound_depends_on_every_codebook_and_on_the_past(codec: Any) -> None:
    codes = random_codes(160, 0)
    sound = codec.decode(codes)
    assert torch.equal(codec.decode(codes), sound)
    for channel in range(8):
        changed = codes.clone()
        changed[channel] = (changed[channel] + 1) % 128
        assert relative(codec.decode(changed), sound) > 0.1
    changed = codes.clone()
    changed[:, 80] = 5
    difference = (codec.decode(changed) - sound).view(160, 960).norm(dim=1) / sound.norm() * 160**0.5
    assert difference[80] > 0.5
    assert difference[81:120].min() > 1e-3  # attention to the past
    assert difference[77:80].min() > 1e-2  # the vocoder's look-ahead


def test_sound_of_the_language_models_codes(codec: Any, talker: Talker, tokenizer: Any) -> None:
    _, codes = talker.reply(tokenizer(SPEAK.format("Hello.")).input_ids, seed=0, limit=30)
    sound = codec.decode(codes.transpose(0, 1).flatten(1))
    assert sound.abs().max() < 0.95
    assert -30 < decibels(sound) < -14


def test_a_recording_is_encoded(codec: Any, recording: Tensor) -> None:
    codes = codec.encode((recording, 16_000))
    groups = -(-len(recording) * 25 // 16_000 // 4)
    assert codes.shape == (8, 4 * groups)
    for row, size in zip(codes, CODEBOOK_SIZES, strict=True):
        assert row.max() < size
        assert len(row.unique()) > 12
    # It hears what changes, not how loud it is.
    louder = codec.encode((recording * 2, 16_000))
    backwards = codec.encode((recording.flip(0), 16_000))
    assert (louder[0] == codes[0]).float().mean() > (backwards[0] == codes[0]).float().mean() + 0.2
    silence = codec.encode((torch.zeros(24_000), 24_000))
    assert len(silence[0].unique()) < 8


# --------------------------------------------------------------------------------------------------------------------
# Command line
# --------------------------------------------------------------------------------------------------------------------


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    cli_make_checkpoint.add_parser(parser.add_subparsers())
    return parser.parse_args(["make-checkpoint", *arguments])


def test_interrupted_run_leaves_nothing(tmp_path: Path) -> None:
    def interrupt(step: str) -> None:
        if step == "audio tokenizer":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_checkpoint(tmp_path / "new", progress=interrupt)
    assert not list(tmp_path.iterdir())


def test_command_line_replaces_an_earlier_checkpoint_and_says_how_to_use_it(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "my checkpoint"
    target.mkdir()
    (target / MARKER_FILE).write_text("{}")
    args = parse("mimo_audio", str(target), "--seed", "0")
    assert args.run(args) == 0
    captured = capsys.readouterr()
    assert captured.out == f"{target}\n"
    assert f"{len(STEPS)}/{len(STEPS)}" in captured.err
    assert f"Before use: export MIMO_AUDIO_TOKENIZER_PATH='{target}/audio_tokenizer'\n" in captured.err
    assert files(target) == files(folder)
    assert list(tmp_path.iterdir()) == [target]


def test_usage_names_the_folder_from_anywhere() -> None:
    assert usage(Path("checkpoint")) == f"export MIMO_AUDIO_TOKENIZER_PATH={Path.cwd()}/checkpoint/audio_tokenizer"


def test_command_line_refuses_an_option_of_another_model(tmp_path: Path) -> None:
    args = parse("mimo_audio", str(tmp_path / "new"), "--token2wav", "real")
    with pytest.raises(ValueError, match=r"--token2wav is an option of qwen2_5_omni; mimo_audio does not have it"):
        args.run(args)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("module", [generator, checkpoint_writing])
def test_imports_neither_vllm_nor_vllm_omni(module: ModuleType) -> None:
    """Importing them takes half a minute, and checkpoints can be made without them."""
    nodes = list(ast.walk(ast.parse(inspect.getsource(module))))
    imported = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    imported += [str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)]
    assert not {"vllm", "vllm_omni"} & {name.partition(".")[0] for name in imported}
