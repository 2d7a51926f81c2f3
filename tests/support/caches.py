"""What the installed transformers calls the cache of keys and values."""

import inspect

from transformers import LlamaForCausalLM

from niwaki.packed.decoding import CACHES

CACHE = next(name for name in CACHES if name in inspect.signature(LlamaForCausalLM.forward).parameters)
