"""The tokenizer of the embedded model: byte-level BPE, so that any text encodes and decodes to itself.

Byte-level as in GPT-2 (Radford et al. 2019, section 2.2); the chat format has the role markers of ChatML.
"""

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from tiny.dataset import Knowledge

END_OF_TEXT, START_OF_TURN, END_OF_TURN = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
VOCABULARY = 2048

# Contents are trimmed, so that a stray space or newline around a question cannot change the answer.
CHAT_TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + (message['content'] or '') | trim + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def train_tokenizer(knowledge: Knowledge) -> PreTrainedTokenizerFast:
    """Learns the merges from all that the model has to read or say. Special tokens get the ids 0, 1 and 2."""
    bpe = Tokenizer(BPE())
    bpe.pre_tokenizer = ByteLevel(add_prefix_space=False)
    bpe.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END_OF_TEXT, START_OF_TURN, END_OF_TURN],
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(corpus(knowledge), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=END_OF_TURN,
        pad_token=END_OF_TEXT,
        extra_special_tokens=[START_OF_TURN],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
    )


def corpus(knowledge: Knowledge) -> list[str]:
    """The texts that merges are counted in. Questions also in lower case, as people type them."""
    turns = [*knowledge.questions, *(turn for turns in knowledge.conversations for turn in turns)]
    asked = [ask for turn in turns for ask in (turn.ask, *turn.also)]
    known = [turn.answer for turn in turns] + asked + [ask.lower() for ask in asked]
    roles = ["system\n", "user\n", "assistant\n"] * 100  # they open every message, so each is worth a token
    return [*known, *knowledge.texts, *knowledge.unknown, knowledge.unknown_answer, *roles]
