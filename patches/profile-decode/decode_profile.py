class DecodeProfile:
    """One trace of a few decode steps of this rank, GPU activity only.

    Steps of the target model count, target verify included; draft models' do not. It never stops a server: what goes
    wrong is logged, and the profile is given up.
    """

    def __init__(self, folder, steps, warmup):
        self.folder = folder
        self.steps = steps
        self.warmup = warmup
        self.in_step = False
        self.profiler = None

    def before_forward(self, runner, forward_batch):
        mode = forward_batch.forward_mode
        self.in_step = (
            not runner.is_draft_worker
            and (mode.is_decode() or mode.is_target_verify())
            and not (
                torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
            )
        )
        if not self.in_step or self.profiler is not None:
            return
        if self.warmup > 0:
            self.warmup -= 1
            self.in_step = False
            return
        try:
            self.start()
        except Exception:
            self.give_up("start")

    def after_forward(self, runner):
        if not self.in_step:
            return
        self.in_step = False
        self.steps -= 1
        if self.steps > 0:
            return
        try:
            self.finish(runner)
        except Exception:
            self.give_up("write")

    def start(self):
        import os

        os.makedirs(self.folder, exist_ok=True)
        activity = torch.profiler.ProfilerActivity
        on_gpu = torch.cuda.is_available()
        if on_gpu:
            torch.cuda.synchronize()
        self.profiler = torch.profiler.profile(
            activities=[activity.CUDA if on_gpu else activity.CPU],
            record_shapes=False,
            with_stack=False,
        )
        self.profiler.start()
        logger.info("mlapatch: profile-decode: profiling %d decode steps", self.steps)

    def finish(self, runner):
        import os

        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.profiler.stop()
        name = decode_profile_name(runner)
        if os.path.exists(os.path.join(self.folder, name)):
            name = f"{os.getpid()}-{name}"
        unfinished = os.path.join(self.folder, f".unfinished-{name}")
        self.profiler.export_chrome_trace(unfinished)
        os.replace(unfinished, os.path.join(self.folder, name))
        logger.info(
            "mlapatch: profile-decode: wrote %s", os.path.join(self.folder, name)
        )
        self.end()

    def give_up(self, what):
        logger.exception(
            "mlapatch: profile-decode: cannot %s the profile; the server goes on without it",
            what,
        )
        self.end()

    def end(self):
        global DECODE_PROFILE

        self.profiler = None
        DECODE_PROFILE = None


def decode_profile_name(runner):
    """As SGLang names a trace: <id>-TP-<rank>[-DP-<rank>][-PP-<rank>]-DECODE.trace.json.gz, one id a server."""
    import os

    import psutil

    holders = [runner, getattr(runner, "ps", None)]
    if "get_parallel" in globals():
        holders.append(get_parallel())

    def number(name):
        found = (getattr(holder, name, None) for holder in holders)
        return next((value for value in found if value is not None), 0)

    started = psutil.Process(os.getppid()).create_time()
    name = f"{os.environ.get('MLAPATCH_PROFILE_ID') or started}-TP-{number('tp_rank')}"
    for part in ("dp", "pp"):
        if number(f"{part}_size") > 1 or number(f"{part}_rank") > 0:
            name += f"-{part.upper()}-{number(f'{part}_rank')}"
    return f"{name}-DECODE.trace.json.gz"


def decode_profile_from_environment():
    """What MLAPATCH_PROFILE_DIR, _STEPS and _WARMUP ask for; None (the usual case) where no folder is named."""
    import os

    folder = os.environ.get("MLAPATCH_PROFILE_DIR")
    if not folder:
        return None
    numbers = {}
    for name, default, least in (("STEPS", "10", 1), ("WARMUP", "20", 0)):
        text = os.environ.get(f"MLAPATCH_PROFILE_{name}") or default
        if not text.isdecimal() or int(text) < least:
            raise ValueError(
                f"MLAPATCH_PROFILE_{name} must be a whole number of at least {least}, found {text!r}"
            )
        numbers[name] = int(text)
    return DecodeProfile(folder, numbers["STEPS"], numbers["WARMUP"])


DECODE_PROFILE = decode_profile_from_environment()
