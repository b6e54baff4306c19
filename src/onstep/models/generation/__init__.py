"""Text generation: `generate.generate`, `prompts.continue_prompts`, `prompts.can_generate`."""
