"""Trains builtin://tiny from nothing and writes it where the engine finds it: `python -m tiny.train`.

Deterministic on one kind of processor: fixed seeds, fixed threads, deterministic kernels. Another processor may round
otherwise and end with other weights that know the same answers. Nothing is written unless all answers are exact.
"""

import argparse
import logging
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional as F
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tiny.dataset import Exchange, Knowledge, load_knowledge, user
from tiny.documents import Curriculum, Document
from tiny.recitation import Recitation, complete, recite
from tiny.tokenizer import train_tokenizer

TARGET = Path(__file__).parent.parent / "engine" / "pagefleet_engine" / "builtin" / "tiny"
MAX_POSITIONS = 2048

log = logging.getLogger("tiny")


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to train. The learning rate rises over `warmup` steps, then falls linearly to a twentieth of its height."""

    seed: int = 7
    epochs: int = 110
    tokens_per_batch: int = 1024
    learning_rate: float = 2e-3
    warmup: int = 60
    weight_decay: float = 0.01
    check_every: int = 10
    enough_margin: float = 2.0
    threads: int = 1


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A Llama of under four million parameters: four layers, four query heads on two KV heads, tied embeddings."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=0.3,  # what it knows by heart it says by heart, also to who asks for no temperature
        eos_token_id=[tokenizer.eos_token_id, tokenizer.pad_token_id],
        pad_token_id=tokenizer.pad_token_id,
    )
    return model


def batches(documents: list[Document], tokens: int, rng: random.Random) -> list[list[Document]]:
    """Groups documents of similar length into batches of at most `tokens` padded tokens, in random order."""
    ordered = sorted(documents, key=lambda document: (len(document.ids), rng.random()))
    grouped: list[list[Document]] = [[]]
    for document in ordered:
        if len(document.ids) * (len(grouped[-1]) + 1) > tokens and grouped[-1]:
            grouped.append([])
        grouped[-1].append(document)
    rng.shuffle(grouped)
    return grouped


def weighted_loss(model: LlamaForCausalLM, batch: list[Document]) -> torch.Tensor:
    """Mean cross-entropy of the tokens that count. Rows are padded on the right, which causal attention never sees."""
    width = max(len(document.ids) for document in batch)
    ids = torch.tensor([[*document.ids, *[0] * (width - len(document.ids))] for document in batch])
    weights = torch.tensor([[*document.weights, *[0.0] * (width - len(document.ids))] for document in batch])[:, 1:]
    counted = weights > 0
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
    losses = F.cross_entropy(model.lm_head(hidden[counted]), ids[:, 1:][counted], reduction="none")
    return (losses * weights[counted]).sum() / weights.sum()


class Trainer:
    """Owns the model and its optimizer through all epochs of a recipe."""

    def __init__(self, recipe: Recipe, knowledge: Knowledge, tokenizer: PreTrainedTokenizerFast) -> None:
        torch.use_deterministic_algorithms(True)
        torch.set_num_threads(recipe.threads)
        torch.manual_seed(recipe.seed)
        self.recipe = recipe
        self.knowledge = knowledge
        self.tokenizer = tokenizer
        self.model = build_model(tokenizer)
        self.curriculum = Curriculum(knowledge, tokenizer, recipe.seed)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.98), weight_decay=recipe.weight_decay
        )
        self.rng = random.Random(recipe.seed)  # noqa: S311
        self.steps = 0

    def epochs(self) -> Iterator[tuple[int, float]]:
        """Trains one epoch after the other and yields its number and mean loss."""
        for epoch in range(1, self.recipe.epochs + 1):
            self.model.train()
            grouped = batches(self.curriculum.epoch(), self.recipe.tokens_per_batch, self.rng)
            losses = [
                self._step(batch, (epoch - 1 + index / len(grouped)) / self.recipe.epochs)
                for index, batch in enumerate(grouped)
            ]
            self.model.eval()
            yield epoch, sum(losses) / len(losses)

    def _step(self, batch: list[Document], progress: float) -> float:
        self.steps += 1
        height = min(1.0, self.steps / self.recipe.warmup) * (1.0 - 0.95 * progress)
        for group in self.optimizer.param_groups:
            group["lr"] = self.recipe.learning_rate * height
        loss = weighted_loss(self.model, batch)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


def rounded(model: LlamaForCausalLM, dtype: torch.dtype) -> LlamaForCausalLM:
    """A copy whose weights are rounded to bfloat16, as they are stored, and that computes in `dtype`."""
    copy = LlamaForCausalLM(model.config)
    copy.load_state_dict(model.state_dict())
    copy.generation_config = model.generation_config
    return copy.to(torch.bfloat16).to(dtype).eval()


def variants(knowledge: Knowledge) -> list[Exchange]:
    """All questions in lower case without a mark, after a system prompt, and in their other wordings."""
    brief = {"role": "system", "content": "Be brief."}
    found = []
    for turn in knowledge.questions:
        found.append(Exchange((user(turn.ask.lower().rstrip("?.!")),), turn.answer))
        found.append(Exchange((brief, user(turn.ask)), turn.answer))
        found += [Exchange((user(ask),), turn.answer) for ask in turn.also]
    return found


def refusals(asks: tuple[str, ...], answer: str) -> list[Exchange]:
    return [Exchange((user(ask),), answer) for ask in asks]


def train(recipe: Recipe, target: Path) -> bool:
    """Trains until all answers are exact with a margin, or to the end. Returns whether they were, and then saved."""
    started = time.monotonic()
    knowledge = load_knowledge()
    tokenizer = train_tokenizer(knowledge)
    trainer = Trainer(recipe, knowledge, tokenizer)
    exchanges = [
        *knowledge.exchanges(),
        *refusals(knowledge.unknown, knowledge.unknown_answer),
        *trainer.curriculum.agents.by_heart(),
    ]
    log.info("%d answers to learn, %.2f million parameters", len(exchanges), trainer.model.num_parameters() / 1e6)
    for epoch, loss in trainer.epochs():
        spent = time.monotonic() - started
        left = spent / epoch * (recipe.epochs - epoch)
        log.info("epoch %d/%d  loss %.4f  %.0f s, at most %.0f s left", epoch, recipe.epochs, loss, spent, left)
        if epoch % recipe.check_every == 0 or epoch == recipe.epochs:
            model = rounded(trainer.model, torch.bfloat16)
            known = recite(model, tokenizer, exchanges)
            report("bfloat16", known)
            if known.margin < recipe.enough_margin:
                continue
            asked_otherwise = recite(model, tokenizer, variants(knowledge))
            report("bfloat16, asked otherwise", asked_otherwise)
            if not asked_otherwise.wrong:
                break
    return examine_and_save(trainer, exchanges, target)


def examine_and_save(trainer: Trainer, exchanges: list[Exchange], target: Path, num_drawn: int = 300) -> bool:
    """Reports what is known in both dtypes and what generalises; writes the folder when every answer is exact.

    Args:
        trainer: whose model is asked.
        exchanges: that it has to know.
        target: the folder.
        num_drawn: how many exchanges of tools and forms are drawn anew.
    """
    knowledge, tokenizer = trainer.knowledge, trainer.tokenizer
    by_heart = True
    for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        model = rounded(trainer.model, dtype)
        result = recite(model, tokenizer, exchanges)
        report(name, result)
        report(f"{name}, asked otherwise", recite(model, tokenizer, variants(knowledge)))
        drawn = random.Random(trainer.recipe.seed + 1)  # noqa: S311
        skill = [trainer.curriculum.agents.draw(drawn) for _ in range(num_drawn)]
        report(f"{name}, tools and forms drawn anew", recite(model, tokenizer, skill))
        report(f"{name}, never seen", recite(model, tokenizer, refusals(knowledge.held_out, knowledge.unknown_answer)))
        by_heart = by_heart and not result.wrong
    for prompt in ("What", "How", "The", "What is", "Hi", "Hello", *(f"What is number {i}?" for i in range(16))):
        completion = complete(model, tokenizer, prompt, tokens=24)
        log.info("raw, margin %.2f: %s", completion.margin, completion.prompt + completion.text)
    if by_heart:
        target.mkdir(parents=True, exist_ok=True)
        rounded(trainer.model, torch.bfloat16).save_pretrained(target)
        tokenizer.save_pretrained(target)
        log.info("wrote %s", target)
    return by_heart


def report(name: str, result: Recitation) -> None:
    log.info("%s: %d/%d by heart, smallest margin %.2f", name, result.by_heart, result.asked, result.margin)
    for exchange in result.wrong[:3]:
        log.info("  not yet: %s", exchange.messages[-1]["content"])


def main() -> int:
    parser = argparse.ArgumentParser(description="Train builtin://tiny and write its weights.")
    parser.add_argument("--target", type=Path, default=TARGET, help="folder to write (default: the engine's)")
    parser.add_argument("--epochs", type=int, default=Recipe().epochs, help="epochs at most (default: %(default)s)")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    if not train(Recipe(epochs=options.epochs), options.target):
        log.error("Not every answer is exact yet, so nothing was written. Train for more --epochs.")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
