"""Who gets in: queues by priority, fair shares between tenants, limits, and waiting for the first engine."""
