# SPDX-License-Identifier: Apache-2.0
"""The generator of random Qwen2.5-Omni checkpoints."""

import argparse
import ast
import hashlib
import inspect
import json
import string
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
import transformers
from safetensors import safe_open
from transformers import AutoProcessor, DynamicCache, Qwen2_5OmniForConditionalGeneration
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniToken2WavModel

from vllm_omni_audio_perf.cli import make_checkpoint as cli_make_checkpoint
from vllm_omni_audio_perf.testing import byte_tokenizer
from vllm_omni_audio_perf.testing import qwen2_5_omni_checkpoint as generator
from vllm_omni_audio_perf.testing.byte_tokenizer import PRINTABLE_IDS, byte_id, save_byte_tokenizer
from vllm_omni_audio_perf.testing.qwen2_5_omni_checkpoint import MARKER_FILE, STEPS, make_checkpoint, make_config

TEXT_END = 151645
CODEC_END = 8294
NUM_CODES = 8192
PRINTABLE = set(string.ascii_letters + string.digits + string.punctuation + " ")

# The names in the published repository, apart from the number of shards, README, LICENSE and .gitattributes; what
# transformers 5 adds (the template as a file of its own); and the marker.
FILES = {
    "added_tokens.json",
    "chat_template.json",
    "config.json",
    "generation_config.json",
    "merges.txt",
    "model.safetensors.index.json",
    "preprocessor_config.json",
    "special_tokens_map.json",
    "spk_dict.pt",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "chat_template.jinja",
    MARKER_FILE,
}

PROMPT = (
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    "<|im_start|>user\n{}<|im_end|>\n"
    "<|im_start|>assistant\n"
)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint with seed 0."""
    return make_checkpoint(tmp_path_factory.mktemp("checkpoints") / "tiny")


@pytest.fixture(scope="session")
def model(tiny: Path) -> Qwen2_5OmniForConditionalGeneration:
    """The tiny checkpoint, loaded by transformers with the types that its configuration names."""
    return Qwen2_5OmniForConditionalGeneration.from_pretrained(tiny, dtype="auto").eval()


def read_weights(folder: Path, prefix: str = "") -> dict[str, torch.Tensor]:
    weights = {}
    for shard in sorted(folder.glob("*.safetensors")):
        with safe_open(shard, "pt") as tensors:
            weights |= {name: tensors.get_tensor(name) for name in tensors.keys() if name.startswith(prefix)}  # noqa: SIM118
    return weights


def checksums(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def test_file_set(tiny: Path) -> None:
    names = {path.name for path in tiny.iterdir()}
    shards = {name for name in names if name.endswith(".safetensors")}
    assert names - shards == FILES
    assert len(shards) > 1
    index = json.loads((tiny / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == shards
    weights = read_weights(tiny)
    assert set(index["weight_map"]) == set(weights)
    assert index["metadata"]["total_size"] == sum(weight.nbytes for weight in weights.values())
    assert sum(path.stat().st_size for path in tiny.iterdir()) < 165e6


@pytest.mark.parametrize("token2wav", ["tiny", "real"])
def test_config(token2wav: generator.Token2WavSize) -> None:
    config = make_config(token2wav)
    assert config.architectures == ["Qwen2_5OmniModel"]
    assert (config.thinker_config.text_config.vocab_size, config.talker_config.vocab_size) == (152064, 8448)
    t2w = config.token2wav_config
    for part in (t2w, t2w.dit_config, t2w.bigvgan_config):
        assert part.dtype == torch.float32
    # What the stages' arithmetic relies on is real in both.
    dit, bigvgan = t2w.dit_config, t2w.bigvgan_config
    assert (dit.block_size, dit.repeats, dit.num_embeds, dit.mel_dim, dit.enc_emb_dim) == (24, 2, 8193, 80, 192)
    assert list(bigvgan.upsample_rates) == [5, 3, 2, 2, 2, 2]
    assert list(bigvgan.upsample_kernel_sizes) == [11, 7, 4, 4, 4, 4]


def test_real_token2wav_has_the_published_sizes() -> None:
    config = make_config("real").token2wav_config
    with torch.device("meta"):
        model = Qwen2_5OmniToken2WavModel(config)
    # As counted by others in the loaded Qwen2.5-Omni-3B, which has the same Token2Wav as the 7B.
    assert sum(parameter.numel() for parameter in model.code2wav_dit_model.parameters()) == 333_607_760
    assert sum(parameter.numel() for parameter in model.code2wav_bigvgan_model.parameters()) == 115_443_504
    dit = config.dit_config
    assert (dit.hidden_size, dit.num_hidden_layers, dit.num_attention_heads, dit.head_dim) == (1024, 22, 16, 64)
    assert (list(dit.look_backward_layers), list(dit.look_ahead_layers)) == ([0, 20], [10])


def test_weight_names_shapes_and_types(tiny: Path) -> None:
    weights = read_weights(tiny)
    # A buffer that vLLM-Omni takes from the files and transformers 5 computes.
    inv_freq = weights.pop("token2wav.code2wav_dit_model.rotary_embed.inv_freq")
    assert inv_freq.shape == (8,)
    config = transformers.AutoConfig.from_pretrained(tiny)
    with torch.device("meta"):
        expected = Qwen2_5OmniForConditionalGeneration(config).state_dict()
    assert {name: weight.shape for name, weight in weights.items()} == {n: w.shape for n, w in expected.items()}
    for name, weight in weights.items():
        assert weight.dtype == (torch.float32 if name.startswith("token2wav.") else torch.bfloat16), name
        assert weight.isfinite().all(), name


def test_same_seed_same_bytes(tiny: Path, tmp_path: Path) -> None:
    random_state = torch.get_rng_state()
    again = make_checkpoint(tmp_path / "again")
    assert torch.equal(torch.get_rng_state(), random_state)
    assert checksums(again) == checksums(tiny)


def test_other_seed_other_weights(tiny: Path, tmp_path: Path) -> None:
    other = read_weights(make_checkpoint(tmp_path / "other", seed=1))
    same = [name for name, weight in read_weights(tiny).items() if torch.equal(weight, other[name])]
    assert same == ["token2wav.code2wav_dit_model.rotary_embed.inv_freq"]


def test_speakers(tiny: Path) -> None:
    speakers = torch.load(tiny / "spk_dict.pt", weights_only=True)
    assert list(speakers) == ["Chelsie", "Ethan"]
    for speaker in speakers.values():
        assert speaker["cond"].shape == (1, 192)
        assert speaker["ref_mel"].ndim == 3
        assert speaker["ref_mel"].shape[::2] == (1, 80)
        assert speaker["cond"].dtype == speaker["ref_mel"].dtype == torch.float32
        assert isinstance(speaker["bos_token"], int)
    assert not torch.equal(speakers["Chelsie"]["cond"], speakers["Ethan"]["cond"])


def test_tokenizer(tiny: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny)
    text = "<|im_start|>user\nGrüße, 世界!\t<|audio_bos|><|AUDIO|><|audio_eos|><tool_call><|im_end|>\n"
    ids = tokenizer(text).input_ids
    assert ids[0] == 151644
    assert ids[1:5] == [byte_id(byte) for byte in b"user"]
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids, skip_special_tokens=True) == "user\nGrüße, 世界!\t<tool_call>\n"
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (TEXT_END, 151643)
    # As in the real vocabulary.
    assert [byte_id(ord(character)) for character in "!~ \n"] == [0, 93, 220, 198]
    assert set(tokenizer.decode(list(PRINTABLE_IDS))) == PRINTABLE
    # No hole: `tokenizers` prints a warning for each.
    assert sorted(tokenizer.get_vocab().values()) == list(range(151665))


@pytest.mark.parametrize(
    ("special", "plain", "message"),
    [({"<a>": 1000}, {"<b>": 1002}, "consecutive"), ({"<a>": 255}, {"<b>": 256}, "255")],
)
def test_tokenizer_refuses_ids(tmp_path: Path, special: dict[str, int], plain: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        save_byte_tokenizer(
            tmp_path,
            special_tokens=special,
            plain_tokens=plain,
            eos_token="<a>",
            pad_token="<a>",
            named_tokens={},
            chat_template="",
        )


def test_processor_and_chat_template(tiny: Path) -> None:
    processor = AutoProcessor.from_pretrained(tiny)
    assert type(processor).__name__ == "Qwen2_5OmniProcessor"
    parts = [
        {"type": "text", "text": "Look and listen: "},
        {"type": "audio", "audio": "a.wav"},
        {"type": "image", "image": "i.png"},
        {"type": "video", "video": "v.mp4"},
    ]
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": "Yes."}]
    rendered = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\nLook and listen: <|audio_bos|><|AUDIO|><|audio_eos|><|vision_bos|><|IMAGE|><|vision_eos|>"
        "<|vision_bos|><|VIDEO|><|vision_eos|><|im_end|>\n"
        "<|im_start|>assistant\nYes.<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert processor.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == rendered
    seconds = 2
    inputs = processor(
        text=rendered.replace("<|vision_bos|><|IMAGE|><|vision_eos|><|vision_bos|><|VIDEO|><|vision_eos|>", ""),
        audio=[torch.zeros(16000 * seconds).numpy()],
        return_tensors="pt",
    )
    assert (inputs["input_ids"] == 151646).sum() == 25 * seconds


def test_text_logits_reach_only_printable_ids(model: Qwen2_5OmniForConditionalGeneration) -> None:
    """Over random contexts, everything but printable characters and the end is out of the sampler's reach."""
    prompt = torch.tensor([[151644, *(byte_id(byte) for byte in b"assistant\n")]])
    ids = torch.randint(256, (8, 120), generator=torch.Generator().manual_seed(0))
    ids = torch.cat([prompt.expand(8, -1), ids], dim=1)
    with torch.no_grad():
        logits = model.thinker(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[:, prompt.shape[1] - 1 :]
    probabilities = logits.float().softmax(-1)
    characters = probabilities[..., list(PRINTABLE_IDS)].sum(-1)
    end = probabilities[..., TEXT_END]
    assert (characters + end).min() > 1 - 1e-4
    assert end[:, 0].max() < 1e-3  # no empty reply
    assert end[:, :10].mean() < 1e-3
    assert 0.02 < end[:, 80:].mean() < 0.5
    assert len(logits.argmax(-1).unique()) > 40


def test_codec_logits_reach_only_codes(model: Qwen2_5OmniForConditionalGeneration) -> None:
    talker = model.talker
    source = torch.Generator().manual_seed(0)
    embed = talker.get_input_embeddings()
    codes = torch.randint(NUM_CODES, (4, 400), generator=source)
    with torch.no_grad():
        # What vLLM-Omni feeds: states of the prompt, then begin-of-codec, then codes with the states of the reply.
        prompt = torch.randn(4, 60, 128, generator=source).to(embed.weight.dtype)
        prompt[:, :, generator._RESERVED] = 0
        inputs = embed(torch.cat([torch.tensor([[8293]] * 4), codes], dim=1))
        inputs = talker.thinker_to_talker_proj(torch.cat([prompt, inputs], dim=1))
        states = talker.model(inputs_embeds=inputs).last_hidden_state[:, prompt.shape[1] :]
        probabilities = talker.codec_head(states).float().softmax(-1)
    end = probabilities[..., CODEC_END]
    assert (probabilities[..., :NUM_CODES].sum(-1) + end).min() > 1 - 1e-4
    assert end[:, :30].max() < 1e-2
    assert 1e-3 < end[:, 250:].mean() < 0.5
    assert len(probabilities[..., :NUM_CODES].argmax(-1).unique()) > 100


@pytest.fixture(scope="session")
def replies(tiny: Path, model: Qwen2_5OmniForConditionalGeneration) -> list[str]:
    """Greedy answers to three prompts, with the repetition penalty of vLLM-Omni's configuration."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny)
    answers = []
    for question in ("Hi", "Tell me a story.", "What is 1 + 1?"):
        ids = tokenizer(PROMPT.format(question), return_tensors="pt").input_ids
        output = model.thinker.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=200,
            do_sample=False,
            repetition_penalty=1.1,
            eos_token_id=TEXT_END,
            pad_token_id=151643,
        )[0, ids.shape[1] :]
        assert output[-1] == TEXT_END
        answers.append(tokenizer.decode(output[:-1]))
    return answers


def test_replies_are_readable_and_differ(replies: list[str]) -> None:
    assert len(set(replies)) == len(replies)
    for reply in replies:
        assert set(reply) <= PRINTABLE
        assert 20 <= len(reply) <= 150
        assert len(set(reply)) > 10


def sample_codes(model: Qwen2_5OmniForConditionalGeneration, seed: int, limit: int) -> Iterator[int]:
    """Sample codes as vLLM-Omni's configuration does, without its repetition penalty."""
    talker, embed = model.talker, model.talker.get_input_embeddings()
    source = torch.Generator().manual_seed(seed)
    state = torch.randn(1, 40, 128, generator=source).to(embed.weight.dtype)
    state[:, :, generator._RESERVED] = 0
    inputs = torch.cat([state, embed(torch.tensor([[8293]]))], dim=1)
    cache = DynamicCache()
    for _ in range(limit):
        states = talker.model(
            inputs_embeds=talker.thinker_to_talker_proj(inputs), past_key_values=cache, use_cache=True
        ).last_hidden_state
        logits, ids = (talker.codec_head(states[0, -1]).float() / 0.9).topk(40)
        probabilities = logits.softmax(-1)
        probabilities[probabilities.cumsum(-1) - probabilities > 0.8] = 0
        code = int(ids[torch.multinomial(probabilities, 1, generator=source)])
        if code == CODEC_END:
            return
        yield code
        inputs = embed(torch.tensor([[code]]))


@torch.no_grad()
def test_talker_ends_after_some_seconds(model: Qwen2_5OmniForConditionalGeneration) -> None:
    lengths = []
    for seed in range(3):
        codes = list(sample_codes(model, seed, limit=600))
        assert max(codes) < NUM_CODES
        assert len(set(codes)) > len(codes) / 4
        lengths.append(len(codes))
    assert min(lengths) >= 40
    assert max(lengths) < 600


def decibels(sound: torch.Tensor) -> float:
    return 10 * float(sound.square().mean().log10())


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


class Decoder:
    """transformers' Token2Wav of a checkpoint, with seeded noise."""

    def __init__(self, folder: Path) -> None:
        self.model = Qwen2_5OmniToken2WavModel(transformers.AutoConfig.from_pretrained(folder).token2wav_config).eval()
        weights = read_weights(folder, "token2wav.")
        weights.pop("token2wav.code2wav_dit_model.rotary_embed.inv_freq")
        self.model.load_state_dict({name.removeprefix("token2wav."): weight for name, weight in weights.items()})
        self.speakers = torch.load(folder / "spk_dict.pt", weights_only=True)

    @torch.no_grad()
    def mel(self, codes: torch.Tensor, speaker: str = "Chelsie", noise: int = 0) -> torch.Tensor:
        """Return the log mel (1, 80, frames) of codes (1, length)."""
        voice = self.speakers[speaker]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(noise)
            return self.model.code2wav_dit_model.sample(voice["cond"], voice["ref_mel"], codes)

    @torch.no_grad()
    def __call__(self, codes: torch.Tensor, speaker: str = "Chelsie", noise: int = 0) -> torch.Tensor:
        """Return the sound (samples,) of codes (1, length)."""
        return self.model.code2wav_bigvgan_model(self.mel(codes, speaker, noise))


def random_codes(length: int, seed: int) -> torch.Tensor:
    return torch.randint(NUM_CODES, (1, length), generator=torch.Generator().manual_seed(seed))


def assert_speech_level(sound: torch.Tensor) -> None:
    assert -30 < decibels(sound) < -12
    assert sound.abs().max() < 0.95  # 1 is where the model clips
    assert sound.mean().abs() < 1e-2
    windows = sound[: len(sound) // 2400 * 2400].view(-1, 2400)  # 0.1 s
    assert all(-40 < decibels(window) < -6 for window in windows)


@pytest.fixture(scope="session")
def decoder(tiny: Path) -> Decoder:
    return Decoder(tiny)


@pytest.mark.parametrize("speaker", ["Chelsie", "Ethan"])
@pytest.mark.parametrize("seed", [0, 1])
def test_sound_has_the_level_of_speech(decoder: Decoder, speaker: str, seed: int) -> None:
    sound = decoder(random_codes(60, seed), speaker, noise=seed)
    assert sound.shape == (60 * 2 * 240,)
    assert_speech_level(sound)


def test_sound_depends_on_codes_speaker_noise_and_neighbours(decoder: Decoder) -> None:
    codes = random_codes(60, 0)
    sound = decoder(codes)
    assert torch.equal(decoder(codes), sound)
    assert relative(decoder(random_codes(60, 1)), sound) > 0.2
    assert relative(decoder(codes, "Ethan"), sound) > 0.1
    assert relative(decoder(codes, noise=1), sound) > 0.1

    # A code makes a difference beyond its own block of 24 frames, through the layers that look at its neighbours.
    changed = codes.clone()
    changed[0, 30] = (changed[0, 30] + 1) % NUM_CODES
    difference = (decoder.mel(changed) - decoder.mel(codes)).abs().amax(dim=(0, 1)).view(-1, 24).amax(dim=1)
    assert difference[2] > 0.1
    assert difference[[1, 3]].min() > 1e-2


def test_modulation_of_the_dit_is_neither_off_nor_wild(decoder: Decoder) -> None:
    gates = []
    norms = [block.attn_norm for block in decoder.model.code2wav_dit_model.transformer_blocks]
    hooks = [norm.register_forward_hook(lambda _, __, out: gates.extend([out[1], out[4]])) for norm in norms]
    decoder(random_codes(12, 0))
    for hook in hooks:
        hook.remove()
    rms = torch.stack(gates).square().mean(dim=(1, 2)).sqrt()
    assert rms.min() > 0.2
    assert rms.max() < 1


@pytest.mark.slow
def test_real_size_has_the_level_of_speech(tmp_path: Path) -> None:
    decoder = Decoder(make_checkpoint(tmp_path / "real", token2wav="real"))
    for seed, speaker in enumerate(("Chelsie", "Ethan")):
        assert_speech_level(decoder(random_codes(24, seed), speaker, noise=seed))


@pytest.mark.parametrize("existing", ["folder", "file"])
def test_refuses_what_it_did_not_make(tmp_path: Path, existing: str) -> None:
    target = tmp_path / "mine"
    kept = target
    if existing == "folder":
        target.mkdir()
        kept = target / "thesis.txt"
    kept.write_text("unique")
    with pytest.raises(FileExistsError, match="mine"):
        make_checkpoint(target)
    assert kept.read_text() == "unique"
    assert list(tmp_path.iterdir()) == [target]


def test_refuses_unknown_size(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tiny, real.*'huge'"):
        make_checkpoint(tmp_path / "new", token2wav="huge")  # type: ignore[arg-type]
    assert not (tmp_path / "new").exists()


def test_interrupted_run_leaves_nothing(tmp_path: Path) -> None:
    def interrupt(step: str) -> None:
        if step == "safetensors":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_checkpoint(tmp_path / "new", progress=interrupt)
    assert not list(tmp_path.iterdir())


def test_command_line_replaces_an_earlier_checkpoint(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "checkpoint"
    target.mkdir()
    (target / MARKER_FILE).write_text("{}")
    (target / "left_over").write_text("")
    parser = argparse.ArgumentParser()
    cli_make_checkpoint.add_parser(parser.add_subparsers())
    args = parser.parse_args(["make-checkpoint", "qwen2_5_omni", str(target), "--token2wav", "tiny", "--seed", "0"])
    assert args.run(args) == 0
    captured = capsys.readouterr()
    assert captured.out == f"{target}\n"
    assert f"{len(STEPS)}/{len(STEPS)}" in captured.err
    assert checksums(target) == checksums(tiny)
    assert list(tmp_path.iterdir()) == [target]


def test_command_line_refuses_unknown_model(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    cli_make_checkpoint.add_parser(parser.add_subparsers())
    with pytest.raises(SystemExit):
        parser.parse_args(["make-checkpoint", "gpt2", "folder"])
    assert "qwen2_5_omni" in capsys.readouterr().err


@pytest.mark.parametrize("module", [generator, byte_tokenizer, cli_make_checkpoint])
def test_imports_neither_vllm_nor_vllm_omni(module: ModuleType) -> None:
    """Importing them takes half a minute, and checkpoints can be made without them."""
    nodes = list(ast.walk(ast.parse(inspect.getsource(module))))
    imported = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    imported += [str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)]
    assert not {"vllm", "vllm_omni"} & {name.partition(".")[0] for name in imported}
