"""The verbs and other first words of the names of functions, for tests/test_language.py."""

from __future__ import annotations

_VERBS = """
    abort accept accuse acknowledge activate adapt add admit adopt advance aggregate alias allow announce answer apply
    arrange assemble assign attach augment average back become begin bind boot bound cache calibrate call cancel carry
    catch change check choose classify clean clear clip close cluster collect combine commit compare compute configure
    confirm connect convert copy count create crop cut decide declare decode decorate delete deliver denoise derive
    describe diagnose die disconnect distribute divide do draw drop dump embed emit encode end enlist enrol enter equip
    erase escape estimate evaluate examine exclude execute executemany expand expire explain export fail favour federate
    feed fetch fill filter find fine finish fit fix flatten flip flock flush follow forget format freeze fuse get give
    grade grant greet group grow guard halve hand handle hold identify ignore import infer inherit init insert inspect
    install interpolate introduce invoke issue iterate join kill learn limit list listen load lock log main make map
    mark mask measure merge migrate minimise mix move name narrow normalise notify number observe offer open overlay
    pack pad parse partition paste pause perform personalise place plan plot point pool predict prepare preprocess
    present preserve pretrain prevent print probe process profile project prolong prove prune publish pump put quantise
    raise randomise rank read readmit recall receive recluster record recover reduce refit refresh refuse register
    rehearse reissue reject release reload remake remember remove rename render renew repair repeat replace report
    request requeue require resend reserve reshape resolve rest restart restore resume retain retire revert revoke roll
    rotate round run save scale schedule score screen seal secure seed select send serve set settle share shift show
    sign silence simplify simulate skip sleep spawn split spread stack stage standardise start state step stop store
    stream strip submit subscribe subtract suggest sum summarise supervise swap switch sync take touch trace track train
    transact transfer translate trigger trust try tune turn unflatten unpack unscale unseal unsubscribe unwatch update
    use validate verify view wait warn watch work wrap write
"""
VERBS = frozenset(_VERBS.split())
"""In the imperative: what the function does."""

_PREDICATES = """
    admits allows are asks awaits can differs drifts drops exceeds fits has holds is knows learns matches matters
    may moves needs overfits should takes uses wants was
"""
PREDICATES = frozenset(_PREDICATES.split())
"""Of functions that answer a question."""

_PREPOSITIONS = """
    from on to with without
"""
PREPOSITIONS = frozenset(_PREPOSITIONS.split())
"""Of constructors and conversions, changed copies, and what is called when something happens."""

NAMES_THAT_STAY = {
    "_dynamo": "its name is part of the error message (attempt.__name__)",
    "_fetch": "override of python-tuf's FetcherInterface",
    "_missing_": "enum calls it",
    "_repr_html_": "IPython calls it",
    "_should_skip_dynamo": "torch calls it",
    "_torchscript": "its name is part of the error message (attempt.__name__)",
    "aclose": "asynchronous generators have it",
    "agglomerative": "an algorithm of that name",
    "aidc": "an algorithm of that name",
    "backward": "torch's word for it",
    "bag": "as cnn",
    "by_k_means": "entry point whose path and docstring `fedge methods --parts` prints",
    "by_label": "entry point whose path and docstring `fedge methods --parts` prints",
    "by_linkage": "entry point whose path and docstring `fedge methods --parts` prints",
    "by_lot": "entry point whose path and docstring `fedge methods --parts` prints",
    "by_paper": "entry point whose path and docstring `fedge methods --parts` prints",
    "by_time": "entry point whose path and docstring `fedge methods --parts` prints",
    "centred_clipping": "an algorithm of that name",
    "cnn": "networks go by their names in the literature, and tasks name them",
    "cnn_fedavg": "networks go by their names in the literature, and tasks name them",
    "connection_lost": "asyncio calls it",
    "connection_made": "asyncio calls it",
    "const": "as Graph.op",
    "cross_entropy": "a function of mathematics",
    "data_received": "asyncio calls it",
    "decode": "used as protocol.decode; imperative",
    "device_data": "classes of users have it",
    "emit": "logging calls it",
    "encode": "used as protocol.encode; imperative",
    "entropy": "a function of mathematics",
    "eof_received": "asyncio calls it",
    "exception": "logging calls it",
    "exec_module": "importlib calls it",
    "executemany": "as in sqlite3 and asyncpg",
    "forward": "torch calls it",
    "get_next": "override of ONNX Runtime's CalibrationDataReader",
    "init": "methods have it",
    "invoke": "click calls it",
    "json_lines_option": "called like click's `option`",
    "json_option": "called like click's `option`",
    "kmeans": "an algorithm of that name",
    "last_option": "called like click's `option`",
    "load": "`deploy.load` and `fedge.load` of the Python interface",
    "keys": "dict() calls it",
    "main": "the name of a program's first function",
    "many": "device halves of steps have it",
    "mctc": "an algorithm of that name",
    "median": "a function of mathematics",
    "method_options": "called like click's `option`",
    "mlp": "networks go by their names in the literature, and tasks name them",
    "unet": "networks go by their names in the literature, and tasks name them",
    "autoencoder": "networks go by their names in the literature, and tasks name them",
    "logsumexp": "a function of mathematics of that name",
    "sigmoid": "a function of mathematics of that name",
    "softplus": "a function of mathematics of that name",
    "mobilenet_v3_small": "networks go by their names in the literature, and tasks name them",
    "multi_krum": "an algorithm of that name",
    "never": "reads as the default of an argument: `stop=never`",
    "op": "as torch.onnx's g.op; some sixty uses in formulas",
    "ops": "as Graph.op",
    "option": "called like click's, which it stands for",
    "otsu": "an algorithm of that name",
    "passes": "steps of users have it",
    "randomised_response": "a mechanism with a name",
    "resnet_18": "networks go by their names in the literature, and tasks name them",
    "resnet_moe": "networks go by their names in the literature, and tasks name them",
    "reveals": "steps of users have it",
    "select": "entry point whose path and docstring `fedge methods --parts` prints",
    "settings_options": "called like click's `option`",
    "silhouette": "a function of mathematics",
    "softmax": "a function of mathematics",
    "spec": "classes of users have it",
    "trimmed_mean": "a function of mathematics",
    "uploads": "steps of users have it",
    "warning": "called like the method of `logging.Logger` that it stands for",
    "with_noise": "with_x: a changed copy",
}
"""Names that are no verbs, each with the reason."""
