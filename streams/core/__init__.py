"""What is cached where, as pure code: no Django, no sockets, no clock, no threads.

Read in this order: `events` (what an engine says), `wire` (bytes to events), `content_key` (our
name of a block), `view` (one stream's blocks), `table` (all streams' blocks by content key),
`query` (a prompt against the table), `sequence` and `lifecycle` (when a view may be served).
"""
