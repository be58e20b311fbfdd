"""Tables of sessions, their calls, and the parts of calls: nodes, engines, settings, completions."""

from __future__ import annotations

from sqlalchemy import BigInteger, Boolean, Column, Double, ForeignKey, Index, Integer, LargeBinary, Table, Text

from polar_proxy.store.schema.base import PackedJson, counter_column, json_column, metadata, serial

sessions = Table(
    "sessions",
    metadata,
    Column("session_id", Text, primary_key=True),
    Column("key_hash", LargeBinary, unique=True),  # SHA-256 of the key, which is never stored
    Column("label", Text),
    Column("origin", Text, nullable=False),  # key, open, rollout, user
    # No foreign key: rollouts.session_id refers to this table, and a circle of keys could not be inserted.
    Column("rollout_id", Text, index=True),
    json_column("policy", nullable=True),
    Column("created_at", Double, nullable=False),
    Column("closed_at", Double),
    Column("incomplete", Text),  # machine-readable reason why it must not be trained on; null: all calls are recorded
    Column("spent", Text),  # the budget limit that the session reached, such as max_calls; further calls are refused
    # Updated in the transaction that adds the calls, so that listings need not count calls.
    counter_column("calls"),
    counter_column("failed_calls"),
    counter_column("prompt_tokens"),
    counter_column("completion_tokens"),
    Column("price_usd", Double),  # sum of the known prices of its calls; null: none is known
    Column("last_call_at", Double),
    Column("reward", Double),  # the newest reward of a session without a rollout; all rewards are in `rewards`
    Column("rating", Double),  # the newest rating that a person gave, 1 to 5
)

open_calls = Table(
    "open_calls",  # announced calls, if several gateways share the database; the commit of a call deletes its row
    metadata,
    Column("call_id", Text, primary_key=True),
    # No foreign key: a row may outlive its session for a moment and must not prevent pruning.
    Column("session_id", Text, nullable=False, index=True),
    Column("gateway", Text, nullable=False, index=True),  # HOST:PID:..., renews `lease_expires_at` while it runs
    Column("started_at", Double, nullable=False),
    Column("lease_expires_at", Double, nullable=False),  # after this time the call counts as lost
)

nodes = Table(
    "nodes",  # messages, lists of tools and parts of prompts, each stored once; `parent_id`: the node before it
    metadata,
    Column("node_id", LargeBinary, primary_key=True),
    Column("parent_id", LargeBinary, ForeignKey("nodes.node_id")),
    Column("kind", Text, nullable=False),  # message, tools, tokens
    Column("length", Integer, nullable=False),  # tokens (kind tokens) or bytes of this node
    Column("chain_length", BigInteger, nullable=False),  # length of this node and all its ancestors
    Column("data", LargeBinary, nullable=False),
)

engines = Table(
    "engines",
    metadata,
    Column("engine_hash", LargeBinary, primary_key=True),
    Column("engine", Text, nullable=False),
    Column("version", Text, nullable=False),
    Column("model", Text, nullable=False),
    json_column("info"),
)

settings = Table(
    "settings",
    metadata,
    Column("settings_hash", LargeBinary, primary_key=True),
    json_column("value"),
)

calls = Table(
    "calls",
    metadata,
    Column("call_id", Text, primary_key=True),
    Column("session_id", Text, ForeignKey("sessions.session_id"), nullable=False),
    Column("dialect", Text, nullable=False),
    Column("path", Text, nullable=False),
    Column("stream", Boolean, nullable=False),
    Column("model", Text, nullable=False),
    Column("engine_hash", LargeBinary, ForeignKey("engines.engine_hash")),
    Column("engine_name", Text),  # in the settings [engines]; null: the engine of [engine]
    Column("route", Text),  # the rule that chose the engine
    Column("weight_version", Text),
    Column("logprob_mode", Text, nullable=False),
    Column("status", Text, nullable=False),
    Column("http_status", Integer, nullable=False),
    Column("error", Text),
    Column("edge", Text, nullable=False),
    # No foreign key: a call may be committed before the one it continues.
    Column("parent_call_id", Text),
    Column("rule", Text),  # the lineage rule that decided the edge
    Column("ambiguous", Boolean, nullable=False),
    Column("thread", Text),
    Column("hooks", PackedJson),  # what hooks changed: parts of the request as the model saw them, answers as sampled
    Column("fingerprint", PackedJson),  # for recognising the conversation after a restart
    Column("prompt_mode", Text, nullable=False),  # render (by the engine), continue (tokens of the base)
    Column("prompt_reason", Text),  # why it does not continue the tokens of the base
    Column("base_call_id", Text),  # the base: the answered call whose conversation this call extends
    Column("base_choice", Integer),
    Column("message_count", Integer, nullable=False),
    Column("messages_node", LargeBinary, ForeignKey("nodes.node_id")),
    Column("tools_node", LargeBinary, ForeignKey("nodes.node_id")),
    Column("params_hash", LargeBinary, ForeignKey("settings.settings_hash"), nullable=False),
    Column("sampling_hash", LargeBinary, ForeignKey("settings.settings_hash"), nullable=False),
    Column("prompt_node", LargeBinary, ForeignKey("nodes.node_id")),
    Column("prompt_tail", LargeBinary),  # packed ids after the chain of `prompt_node`
    Column("prompt_tokens", Integer),  # null: the engine returned no ids
    Column("completion_tokens", Integer, nullable=False),
    Column("cached_tokens", Integer),
    # The provider's count of a hosted call; null: the engine returned token ids.
    Column("input_tokens", Integer),
    Column("output_tokens", Integer),
    Column("cache_write_tokens", Integer),
    Column("cache_write_1h_tokens", Integer),
    Column("reasoning_tokens", Integer),
    Column("usage_model", Text),  # the model that answered, as the provider names it
    Column("service_tier", Text),
    Column("usage_estimated", Boolean),  # counted by Polar
    Column("price_usd", Double),  # null: unknown
    Column("started_at", Double, nullable=False),
    Column("first_token_at", Double),
    Column("ended_at", Double, nullable=False),
    Column("provider_conversation", Text),  # the provider's id of the conversation that the call adds to
    Column("deleted_at", Double),  # when its client deleted the response; the call stays, and is trained on
    Index(None, "session_id", "started_at", "call_id"),
)

completions = Table(
    "completions",
    metadata,
    Column("call_id", Text, ForeignKey("calls.call_id"), primary_key=True),
    Column("choice_index", Integer, primary_key=True, autoincrement=False),
    Column("finish_reason", Text),
    Column("tokens", Integer, nullable=False),
    Column("message", LargeBinary, nullable=False),
    Column("token_ids", LargeBinary, nullable=False),
    Column("logprobs", LargeBinary, nullable=False),
    Column("reasoning_tokens", Integer),  # tokens up to the end of the reasoning; null: none, or not known
    Column("provider_turn", LargeBinary),  # packed JSON: the answer with the signatures that its provider wants back
    json_column("versions", nullable=True),  # [[first position, policy version], ...] if the version changed
)

provider_ids = Table(
    "provider_ids",  # ids that a provider gave to a passed-through response and its items; later requests refer to them
    metadata,
    Column("call_id", Text, ForeignKey("calls.call_id", ondelete="CASCADE"), primary_key=True),
    Column("provider_id", Text, primary_key=True),
    Column("session_id", Text, nullable=False),
    Column("place", Text),  # of an item: its kind and number in the record, such as fc_0; null: the response
    Index(None, "session_id", "provider_id"),
)

conversations = Table(
    "conversations",  # conversations of the Responses API; Polar keeps their items, and each call may add items
    metadata,
    Column("conversation_id", Text, primary_key=True),
    Column("session_id", Text, ForeignKey("sessions.session_id"), nullable=False, index=True),
    json_column("metadata"),
    Column("created_at", Double, nullable=False),
    Column("at_provider", Boolean, nullable=False),  # true: the provider keeps it; only its first items are here
)

conversation_items = Table(
    "conversation_items",
    metadata,
    Column("position", serial, primary_key=True, autoincrement=True),  # in the order in which items were added
    Column(
        "conversation_id",
        Text,
        ForeignKey("conversations.conversation_id", ondelete="CASCADE"),
        nullable=False,
        index=True,
    ),
    Column("item_id", Text, nullable=False),
    Column("length", Integer, nullable=False),  # bytes of `item` and `shown` as JSON
    Column("item", LargeBinary, nullable=False),  # packed JSON, as the model reads it
    Column("shown", LargeBinary),  # packed JSON, as the client got it; null: equal to `item`
)

rescores = Table(
    "rescores",  # tokens of answers recorded as text, encoded and scored later
    metadata,
    Column("call_id", Text, ForeignKey("calls.call_id"), primary_key=True),
    Column("choice_index", Integer, primary_key=True, autoincrement=False),
    Column("engine_hash", LargeBinary, ForeignKey("engines.engine_hash"), nullable=False),
    Column("weight_version", Text),
    Column("prompt_node", LargeBinary, ForeignKey("nodes.node_id")),
    Column("prompt_tokens", Integer, nullable=False),
    Column("token_ids", LargeBinary, nullable=False),
    Column("logprobs", LargeBinary, nullable=False),
    Column("created_at", Double, nullable=False),
)
