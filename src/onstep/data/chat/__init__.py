"""Conversations: `records` reads them, `template` renders them to token ids, `dataset` packs them into sequences."""
