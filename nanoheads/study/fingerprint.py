"""
What a run's numbers come from, as one hash: the code that makes them, named here definition by definition.

A definition is named as `function`, `Class` or `Class.method`, without its file: it is found in whatever file
of a run it stands, train.py and all that it imports, so that moving or renaming a file leaves every hash.
Not in the hash: comments, docstrings, annotations, what an error says, what is printed or logged, flags and
their checks. A class is there without those of its methods that are named apart. A name that is not found is
an error; tests/test_fingerprint.py says what is missing: it compares the names with what a run executes.
"""

import ast
import copy
import functools
import hashlib
from dataclasses import asdict
from pathlib import Path

from model import MECHANISM_CLASSES
from nanoheads.common import ROOT, UserError
from nanoheads.hub import own_mechanism as own
from nanoheads.training.config import ControllerConfig, TrainConfig

# ---- names ----

# the plain GPT, its kernels, its loss
MODEL = """
    GPT HeadControl AttentionCore CausalSelfAttention Block MLP RMSNorm make_norm rope_tables Mechanism
    rotate CpuHeads heads_of grouped_heads_of for_each_head normed_and_rotated
    CausalMask block_mask KERNEL_BLOCK Pass Output Uniform product_dtype
    PlainConfig.head_size PlainConfig.weight_dropout AT_ONCE portions
    attend costs_a_plan without_cudnn rms_norm relu2 CpuRMSNorm CpuSquaredReLU first_derivative_only
    eager_on_cpu inverse_rms ChunkedCrossEntropy padded_rows has_flex_attention
    Linear CpuLinear onednn_product ONEDNN ONEDNN_FROM
""".split()
# one step: batches, rates, gradients, updates; and the order of all that
STEP = """
    Trainer Unread CastWeights make_optimizers AdamW block_matrices of_mechanisms lr_multiplier precision
    compiles seed_step CUDA_GRAPHS
    Process Dataset after_each Reader REOPEN_AFTER Batches
    train loop batch_at send evaluate_splits batches_of save_checkpoint starting_point
""".split()
# the loss on a split, in training and of the trained model
SCORE = """
    build file_of score_of score score_windows windows windows_of window_ids nats_of nats_of_last
    LOGITS_AT_ONCE bits summed scored_text
    Tokenizer token_sizes char_sizes byte_symbols gpt2 END_OF_TEXT SAFE_CUT cut_at_spaces
    SPACE spelled_by nothing_before
""".split()
MUON = """
    Muon matrices_in even_rows orthogonalise in_low_precision cpu_multiplies_bfloat16 quintic QUINTICS
    STRETCHED MARGIN
""".split()

# kernels that some mechanisms need
FLEX = "flex compiled_flex flex_tiles FLEX_MIN ROOMY allow_graphs".split()
FLOAT32 = "float32_linear float32_product linear32".split()
ROW_STATISTICS = [*FLEX, *"RowStats row_statistics one_row attend_lse CpuFlash".split()]
# what a mechanism needs beside its class
OF_MECHANISM = {
    "HeadRouter": [*FLEX, *FLOAT32, *"attend_packed attend_selected SKIP_FROM".split()],
    "AdvantageAttention": ["ValueHead", "discounted_return", *FLOAT32],
    "Agency": FLOAT32,
    "HeadRoles": FLOAT32,
    "ConstraintHeads": [*ROW_STATISTICS, *FLOAT32, *"""
        SentinelGate label_losses distance_to_teacher attend_in_rows
    """.split()],
    "ContextGate": ROW_STATISTICS,
    "Sink": ROW_STATISTICS,
    "ShortConv": "short_convolution CpuShortConvolution kept".split(),
    "ForgettingAttention": ["kept", "wider", "in_parts", *FLOAT32],
    "DifferentialAttention": "attend_once_more own_heads with_extra masked_logits".split(),
    "DifferentialAttentionV1": "attend_once_more own_heads with_extra in_other_order".split(),
    "DepthAttention": "float32_product linear32 weighted_sum".split(),
    "DenseConnections": ["project_each", "weighted_sum"],
    "PairedHeads": [*ROW_STATISTICS, *"own_heads with_extra in_other_order masked_logits".split()],
    "HeadMixing": ["with_extra"],
    "SkipFusion": "UNet identity_of_h logit".split(),
    "Window": [*FLEX, "random_cells", "blocks_reached"],
}

# what some runs do
LABELS = "Targets label_file decode UNKNOWN VALUES".split()
TEACHER = "teacher_of GPT.predictions".split()
DOCUMENTS = "DocumentBatches Dataset.documents beginnings BEGINNINGS TITLE".split()
FREEZE = "trained_alone".split()
START = """
    turned_on neutral_flags extended same_logits make_neutral mode_of scale_heads
    GPT.crop_block_size CausalMask.crop
""".split()
DYNAMIC_HEADS = ROW_STATISTICS + """
    Controller KEYS starting_config start step FixedGates MOVERS small_net move_gates set_sparsity
    Measurements FEATURES layer_mean attentions static_gates all_heads fixed_text inputs_of evaluating nats_on
    kept_by_hooks
    measure projections out_projections half_metrics mean_gate closed METRICS GATES
    measure_pieces piece_matrices piece_metrics outputs_of Pieces PIECE_METRICS tensors_of arrays_of
    Surgery fold_gates fold_piece insert_heads stack_blocks put_rows new_trainer keep_rows put rows_of
    set_heads HeadAxis
    prune_heads prune_layer whole_groups scale_heads rows_of_heads passes_on
    HeadControl.set_head HeadControl.gates AttentionCore.all_head_ids
    AttentionCore.head_axes CausalSelfAttention.head_axes
    States FAVOUR states_of share_with_agency Rules find_violations agencies place_of heads_at_work
""".split()
MOVER = {"rules": ["ByRules"], "ann": ["ByNetwork"], "rl": ["ByReward"]}

# what a run executes and no number comes from: configs (their values are in the hash as they are), messages,
# logs, files as they are written and read back, the command line, generated text
NOT_NUMBERS = set("""
    GPTConfig PlainConfig RECIPES choices range_problems plain_problems flag RANGES TrainConfig OPTIMIZERS
    ControllerConfig check_model no_dropout add_mechanism BETWEEN_BLOCKS
    MECHANISM_CLASSES HEAD_MECHANISMS MECHANISMS NEUTRAL ALL_ON
    heads_in_words of_critic some_windows critic_summary variance centred correlation CRITICISED
    Run PROGRESS join_ranks pick_device checked_device keep_freed_memory
    StopSignal Process.print0 Process.barrier
    log_steps log_step log_eval eval_line count_time open_bar open_folder print_run print_changes saves_in
    end_stopped
    Log append_row log_violation write_config read_rows parsed number write_rows git_commit
    keys_of comments source_lines classes_of
    save read config_of restore last_save from_nanogpt tensors same_vocabulary same_model same_run
    RESUMABLE read_settings switchable HEAD_KEYS FIXED is_folder is_name fetch HUB
    Trainer.load write_atomic write_json json_safe UserError ROOT missing Dataset.need
    sha256 keep GPT2_MERGES GPT2_ENCODER
    pack closed_heads GPT.stream GPT.generate mfu PEAK_TFLOPS KVCache check_sampling penalise sample_token
    ADDED OwnFile opened digest class_in take copy class_for file_for record find
    DocumentBatches.__str__ Tokenizer.open_hf main
""".split())
LISTS = {"modes", "neutral"}  # of a mechanism: names for flags, which a run has been given already
# keys of training that change nothing where they are not set
OFF_UNLESS_SET = {"labels", "teacher", "documents", "freeze_trunk", "thaw_from", "skip_lr",
                  "own_mechanism"}


# ---- what a run depends on ----

def off_mechanisms(config):
    """The mechanisms that a GPTConfig leaves off."""
    return [cls for cls in MECHANISM_CLASSES if not cls.is_on(config)]


def on_mechanisms(config):
    """The names of the classes of those that are on, in the order in which they act.

    One in a file of its own is not among them: a run's data has that file's digest.
    """
    return [cls.__name__ for cls in MECHANISM_CLASSES
            if cls.is_on(config) and not cls.__module__.startswith("own_mechanism")]


def own_training(config):
    """{key: value} of a TrainConfig that its run depends on: no key of what it does without."""
    return {name: value for name, value in asdict(config).items()
            if (config.dynamic_heads or name not in ControllerConfig.__dataclass_fields__)
            and (value or name not in OFF_UNLESS_SET)}


def own_flags(config):
    """{flag: value} of a GPTConfig that its model depends on: none of a mechanism that is off."""
    off = {name for cls in off_mechanisms(config) for name in cls.fields()}
    return {name: value for name, value in vars(config).items() if name in config.__dataclass_fields__
            and name not in off}


def model_names(config):
    """The definitions that a model of this GPTConfig is made of."""
    on = on_mechanisms(config)
    return {*MODEL, *on, *(name for each in on for name in OF_MECHANISM.get(each, ())), *own_names(config)}


def own_names(config):
    """What a mechanism in a file of its own may use of ours: row statistics, and what it imports."""
    if not (file := own.file_for(config)):
        return ()
    found = {alias.name for node in ast.walk(ast.parse(file.text)) if isinstance(node, ast.ImportFrom)
             for alias in node.names if (node.module or "").split(".")[0] in ("model", "nanoheads")}
    found = found & set(definitions(ROOT)) - NOT_NUMBERS
    return {*ROW_STATISTICS, *found, *(name for each in found for name in OF_MECHANISM.get(each, ())),
            *(FLOAT32 if "float32_linear" in found else ())}


def run_names(config, training=None):
    """The definitions that the numbers of a run come from: of a GPTConfig, trained by a TrainConfig."""
    c = (training or TrainConfig()).for_recipe(config.recipe)
    names = {*model_names(config), *STEP, *SCORE}
    for part, used in ((MUON, c.optimizer == "muon"), (LABELS, c.labels), (TEACHER, c.teacher),
                       (DOCUMENTS, c.documents), (FREEZE, c.freeze_trunk), (START, c.init_from),
                       (DYNAMIC_HEADS, c.dynamic_heads), (MOVER.get(c.controller, ()), c.controller)):
        names.update(part if used else ())
    return names


def code_digest(config, training=None, root=ROOT):
    """A hash of the code that training and scoring a model of this GPTConfig, so trained, executes."""
    lines = [" ".join(on_mechanisms(config)), *code_of(root, run_names(config, training))]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


# ---- the code ----

def code_of(root, names):
    """The text of these definitions, sorted. UserError where one is not among a run's files."""
    if missing := sorted(names - set(definitions(root))):
        raise UserError(f"nanoheads/study/fingerprint.py names {', '.join(missing)}, "
                        "which no file of a run defines")
    return sorted(text for name in names for text in texts(root, name))


@functools.cache
def texts(root, name):
    """The text of each definition of this name, without what makes no number."""
    apart = frozenset(name for name in named() if "." in name)
    return [f"{name}: {ast.unparse(Bare(modules, apart).visit(copy.deepcopy(node)))}"
            for node, modules in definitions(root)[name]]


@functools.cache
def named():
    """All names of this file, those of what is no number too."""
    lists = (MODEL, STEP, SCORE, MUON, ROW_STATISTICS, *OF_MECHANISM.values(), LABELS, TEACHER, DOCUMENTS,
             FREEZE, START, DYNAMIC_HEADS, *MOVER.values(), NOT_NUMBERS)
    return {name for names in lists for name in names} | {cls.__name__ for cls in MECHANISM_CLASSES}


@functools.cache
def definitions(root):
    """{name: [(node, names of our modules in its file)]} of all that a run's files define, methods too."""
    found = {}
    for tree in trees_of(root).values():
        modules = frozenset(name for name, (_, member) in imports(root, tree).items() if member is None)
        for node in tree.body:
            for name in names_set(node):
                found.setdefault(name, []).append((node, modules))
            for method in node.body if isinstance(node, ast.ClassDef) else ():
                if isinstance(method, ast.FunctionDef):
                    found.setdefault(f"{node.name}.{method.name}", []).append((method, modules))
    return found


def names_set(node):
    """The names that a statement of a module defines."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return {node.name}
    if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return {part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)}
    return set()


def trees_of(root, first="train.py"):
    """{file: its tree} of a run: the program, and every module of ours that it imports, directly or not."""
    found, waiting = {}, [Path(root, first)]
    while waiting:
        path = waiting.pop()
        if path not in found:
            found[path] = ast.parse(path.read_text(encoding="utf-8"))
            waiting += [module for module, _ in imports(root, found[path]).values()]
    return found


def imports(root, tree):
    """{name: (file, what of it; None: the module)} of the modules of ours that a file's tree imports."""
    found = {}
    for node in tree.body:
        for alias in node.names if isinstance(node, (ast.Import, ast.ImportFrom)) else ():
            parts = (node.module if isinstance(node, ast.ImportFrom) else alias.name).split(".")
            module, member = Path(root, *parts), None
            if isinstance(node, ast.ImportFrom):
                inner = (module / alias.name).with_suffix(".py")
                module, member = (inner, None) if inner.is_file() else (module, alias.name)
            if (path := module.with_suffix(".py")).is_file():
                found[alias.asname or alias.name] = path, member
    return found


class Bare(ast.NodeTransformer):
    """Leaves of a definition what makes numbers: no words, no annotations, no names of modules.

    modules: names that stand for modules of ours. apart: methods that are left out of their class.
    """

    def __init__(self, modules, apart):
        self.modules = modules
        self.apart = apart

    def generic_visit(self, node):
        super().generic_visit(node)
        if isinstance(getattr(node, "body", None), list) and not node.body:
            node.body = [ast.Pass()]
        return node

    def visit_FunctionDef(self, node):
        if node.name.endswith(("problems", "conflicts")):  # checks of flags: what they let pass is the same
            return None
        node.returns = None
        return self.generic_visit(node)

    def visit_ClassDef(self, node):
        node.body = [line for line in node.body if getattr(line, "name", None) != "Options"
                     and f"{node.name}.{getattr(line, 'name', '')}" not in self.apart
                     and not (isinstance(line, ast.Assign) and names_set(line) & LISTS)]
        return self.generic_visit(node)

    def visit_arg(self, node):
        node.annotation = None
        return node

    def visit_AnnAssign(self, node):
        self.generic_visit(node)
        if node.value is None:
            return ast.Expr(node.target)  # a field
        return ast.copy_location(ast.Assign([node.target], node.value), node)

    def visit_Assign(self, node):
        drawn = isinstance(node.value, ast.Call) and chain(node.value.func) == ["tqdm"]
        return None if drawn else self.generic_visit(node)

    def visit_Raise(self, node):
        return ast.Raise(exc=getattr(node.exc, "func", node.exc), cause=None)

    def visit_Expr(self, node):
        value = self.generic_visit(node).value
        words = isinstance(value, ast.Constant) or isinstance(value, ast.Call) and prints(value)
        return None if words else node

    def visit_Import(self, node):
        return None

    visit_ImportFrom = visit_Import

    def visit_Attribute(self, node):
        self.generic_visit(node)
        if isinstance(node.value, ast.Name) and node.value.id in self.modules:
            return ast.Name(node.attr, node.ctx)
        return node


def chain(node):
    """["a", "b", "c"] of the expression a.b.c; [] of any other."""
    if isinstance(node, ast.Attribute):
        before = chain(node.value)
        return before and [*before, node.attr]
    return [node.id] if isinstance(node, ast.Name) else []


def prints(call):
    """Whether a call prints, logs, draws the bar or is of a function in NOT_NUMBERS."""
    *owners, name = chain(call.func) or [""]
    if owners:
        return name == "print0" or bool({"tqdm", "bar", "log"} & set(owners))
    return name == "print" or name in NOT_NUMBERS
