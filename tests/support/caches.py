"""What transformers calls the cache of keys and values."""

import inspect

from transformers import LlamaForCausalLM

#: "cache" from transformers 5.24 on, where the older name is deprecated.
CACHE = "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"
