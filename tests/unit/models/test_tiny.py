"""Models and tokenizers made on the spot."""

import torch

from ludic.inference import HFChatTemplate
from ludic.models.tiny import tiny_llama, word_tokenizer


def test_every_word_is_a_token_and_comes_back():
    tokenizer = word_tokenizer(["A1", "B2", "X"])
    ids = tokenizer.encode("X A1 B2")
    assert len(ids) == 3 and tokenizer.decode(ids) == "X A1 B2"
    assert tokenizer.encode("what") == [tokenizer.unk_token_id]


def test_its_chat_template_continues_token_by_token():
    template = HFChatTemplate(word_tokenizer(["A1", "B2", "X"]))
    opening = [{"role": "user", "content": "X A1"}]
    prompt = template.apply(opening).prompt_token_ids.tolist()
    reply = [template.tokenizer.convert_tokens_to_ids("B2"), template.tokenizer.eos_token_id]
    messages = [*opening, {"role": "assistant", "content": "B2"}, {"role": "user", "content": "X B2"}]
    delta = template.delta(messages, num_sent=1, completion_token_ids=reply).tolist()
    assert prompt + reply + delta == template.apply(messages).prompt_token_ids.tolist()


def test_a_tiny_llama_is_the_same_for_the_same_seed_and_leaves_the_dice_alone():
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    first, second, other = tiny_llama(32), tiny_llama(32), tiny_llama(32, seed=1)
    assert torch.equal(torch.rand(1), expected)
    assert torch.equal(first.lm_head.weight, second.lm_head.weight)
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)
