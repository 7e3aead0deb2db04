"""Framework adapters with the same functions in each module, so that Run works with any framework.

``start(config)`` joins the ranks, ``finish()`` leaves them; ``barrier()`` and ``total(values)`` wait for all ranks,
``broadcast(...)`` sends the weights of rank 0; ``LaggedSums`` sums losses and stop votes asynchronously;
``input_wait(ranks)`` measures how long the device waits for data; ``save(path, content)`` and ``load(path)`` write
and read one checkpoint file; ``synchronize()`` waits for the device; ``arithmetic(ranks)`` returns the
effective settings that change numerics.
"""
