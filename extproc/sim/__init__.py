"""A simulated vLLM worker: the scheduler and prefix cache of a real one, without a model.

Pure, time is an argument: ``engine`` (the scheduler) over ``step_model``, ``prefix_cache``, ``pace`` and
``statistics``; ``tokens`` and ``answers`` (text); ``chat``, ``completions``, ``responses_api`` and
``pooling`` (wire formats); ``served_models``, ``server_info`` and ``faults``. Shells: ``engine_loop`` (the
engine against the clock), ``ranks`` (several engines in one worker), ``worker`` over ``gate``, ``dispatch``,
``inference``, ``model_routes``, ``service_routes`` and ``control`` (HTTP), ``tls``, ``exposition``
(``/metrics``) and ``command``.
"""
