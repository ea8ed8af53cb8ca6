"""A whole RLHF pipeline small enough to be a fixture: SFT, reward model, then PPO with four models.

Follow the data in the order of the files: `task` (prompts and the true rule), `random` (every random number),
`model` (the transformer), `sft`, `reward_model`, then per PPO step `rollout`, `experience`, `shaping`,
`advantages`, `update` and `controller`. `run` calls them in that order; `record` writes what they return and
`verify` feeds each stage with what was recorded. A stage takes and returns plain dicts of tensors.

Notation: B responses, P prompt positions (padded on the left), T response positions (padded on the right),
L = P + T, V symbols. A mask is True where a token counts.
"""
