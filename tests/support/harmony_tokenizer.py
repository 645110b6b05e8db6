"""A tokenizer with harmony's vocabulary, for chat tests."""

from types import SimpleNamespace

from mlaforge.engine.request import harmony


class HarmonyTokenizer:
    """Minimal tokenizer for chats, with harmony's vocabulary."""

    eos_token_id = 200002
    unk_token_id = None
    all_special_ids = (200002,)
    chat_template = "{{ messages[0].content }}"

    def __init__(self, encoding):
        self.encoding = encoding
        self.added_tokens_decoder = {
            number: SimpleNamespace(content=encoding.decode([number]), special=True) for number in range(199998, 201088)
        }

    def __len__(self):
        return 201088

    def get_added_vocab(self):
        return {token: self.encoding.encode(token, allowed_special="all")[0] for token in harmony.SPECIAL}

    def get_vocab(self):
        return {" " * 128: 0}

    def convert_ids_to_tokens(self, token_id):
        return self.encoding.decode([token_id])

    def convert_tokens_to_ids(self, tokens):
        return [self.encoding.encode(token, allowed_special="all")[0] for token in tokens]

    def decode(self, ids, skip_special_tokens=True, **_):
        visible = [i for i in ids if not (skip_special_tokens and i >= 199998)]
        return self.encoding.decode(visible)

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": self.encoding.encode(text, disallowed_special=())}

    def apply_chat_template(self, messages, **_):
        return messages[0]["content"]
