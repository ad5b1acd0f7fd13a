"""The parts of the simulated engine: cache, queue, events, HTTP. ``loadtest.simengine`` joins them."""
