"""
Faults that the tests must find: each is planted alone in a copy of the repository, and the tests that
are named beside it are run there.

    python tests/planted.py            # all of them: a table, and exit code 1 where one is not found
    python tests/planted.py NAME ...   # some of them
    python tests/planted.py --list     # what they are

A fault is one that a person makes: a sign, an index, a mask, a missing term. Its old text must stand once in
its file; where it stands no more the table says so in a line, and the fault is to be put anew. A file is
named by the end of its path and a test by its file's name, so both may move to other folders.

Before any fault is planted all named tests are run as they are: a test that fails by itself finds nothing.
Several faults are planted at a time, each in a copy of its own.
"""
import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

# The tests of each fault run in a fork of this process, which has these already: to import them takes longer
# than most of the tests.
import hypothesis  # noqa: F401
import matplotlib.pyplot  # noqa: F401
import pytest
import scipy.stats  # noqa: F401
import tokenizers  # noqa: F401
import torch  # noqa: F401

ROOT = Path(__file__).resolve().parents[1]


class Fault(NamedTuple):
    """old, once in file, becomes new; tests: those of which one must fail then."""
    name: str
    file: str
    old: str
    new: str
    tests: tuple


FAULTS = (
    # ---- the model and its mechanisms ----
    Fault("a bias of keys by the query's index", "model.py",
          "score + bias[b, h, s]", "score + bias[b, h, t]",
          ("test_mechanisms.py::test_values_and_gradients_equal_the_written_out_formula[a2c_key_bias]",)),
    Fault("a window one token too wide", "model.py",
          "query - key < self.window)", "query - key <= self.window)",
          ("test_mechanisms.py::test_values_and_gradients_equal_the_written_out_formula[window]",)),
    Fault("a gate set by hand is forgotten", "model.py",
          'heads.gates["by_hand"] = self.gate_by_hand[:, None, None]', "pass",
          ("test_mechanisms.py::test_a_gate_set_by_hand_is_one_more_factor_on_that_head_alone",)),
    Fault("the value's error sends a gradient", "model.py",
          "float32_linear(self, x.detach())", "float32_linear(self, x)",
          ("test_mechanisms.py::"
           "test_values_and_gradients_equal_the_written_out_formula[a2c_temperature]",)),
    Fault("the router's mean without its own token", "model.py",
          "read = read / (forward_pass.positions + 1)[..., None]",
          "read = read / forward_pass.positions.clamp_min(1)[..., None]",
          ("test_mechanisms.py::test_mixtures_equal_the_written_out_formula[skipped]",)),
    Fault("statistics that another mechanism reads are not detached", "model.py",
          "stats = RowStats(*(s if s is None else s.detach() for s in stats))", "pass",
          ("test_mechanisms.py::"
           "test_mixtures_equal_the_written_out_formula[detached beside another reader]",)),
    Fault("a head that is left gets its neighbour's role", "model.py",
          "priors = torch.tensor([self.ROLES[self.role_of(config, head)] for head in attn.head_ids],",
          "priors = torch.tensor([self.ROLES[self.role_of(config, head)] for head in range(attn.n_head)],",
          ("test_mechanisms.py::test_mixtures_equal_the_written_out_formula[pruned]",)),
    Fault("learned states have a value and no gradient", "model.py",
          "gate = gate + torch.where(self.consent, expected - expected.detach(), 0.0)", "pass",
          ("test_mechanisms.py::test_values_and_gradients_equal_the_written_out_formula[agency_learned]",)),
    Fault("a single key's logarithm is guarded too late", "model.py",
          "n = n_keys.masked_fill(alone, 2).to(lse.dtype)", "n = n_keys.to(lse.dtype)",
          ("test_mechanisms.py::test_rows_of_one_key_and_uniform_rows_have_finite_gradients",)),
    Fault("constraint heads that are closed are computed", "model.py",
          "heads.close_all_but(F.pad((gates > 0).any(1), (attn.n_head, 0), value=True))", "pass",
          ("test_attention.py::test_constraint_heads_below_the_threshold_are_not_computed",)),
    Fault("slopes of ALiBi from 1 on", "nanoheads/rivals.py",
          "first = [2 ** (-8 * (i + 1) / power)", "first = [2 ** (-8 * i / power)",
          ("test_attention.py::test_slopes_of_alibi_are_the_papers",)),
    Fault("padding is convolved", "nanoheads/rivals.py",
          "x = x * forward_pass.valid  # padding is no token", "pass",
          ("test_promises.py::test_a_mechanism_keeps_its_promises[short_conv]",)),
    Fault("a cache one token too short", "nanoheads/rivals.py",
          "both[:, -reach:])", "both[:, 1 - reach:])",
          ("test_promises.py::test_a_mechanism_keeps_its_promises[short_conv]",)),
    Fault("positions count the padding of a row", "model.py",
          "positions = (columns - pad[:, None]).clamp_min(0)", "positions = columns.expand(B, T)",
          ("test_promises.py::test_mixtures_read_in_portions_and_padded_are_what_each_row_is_alone",)),
    Fault("a head's output is normed over the batch", "model.py",
          "heads.y = rms_norm(heads.y)", "heads.y = heads.y / heads.y.square().mean(0).sqrt()",
          ("test_promises.py::test_a_mechanism_keeps_its_promises[head_norm]",)),
    Fault("a router reads the mean of the whole text", "model.py",
          "read = sum_so_far(x, forward_pass.begins)", "read = x.sum(1, keepdim=True).expand_as(x)",
          ("test_promises.py::test_a_mechanism_keeps_its_promises[constraint_a]",)),
    Fault("a sum over the text starts anew with each piece of it", "model.py",
          "self.values[layer, name] = value\n        return before",
          "self.values[layer, name] = value\n        return None",
          ("test_promises.py::test_a_mechanism_keeps_its_promises[key_offset]",)),
    Fault("documents in a row see one another", "model.py",
          "return Documents(begins, lambda", "return Documents(begins * 0, lambda",
          ("test_promises.py::test_a_mechanism_keeps_its_promises[query_gain]",)),
    Fault("a return runs over the end of a document", "model.py",
          "discounted_return(-nats, scored, self.gamma, positions)",
          "discounted_return(-nats, scored, self.gamma)",
          ("test_promises.py::"
           "test_losses_of_documents_in_rows_are_those_of_rows_with_padding[a2c_temperature]",)),
    Fault("gates of heads stay when heads are pruned", "model.py",
          "sentinel_l0\": {}}  # l0: as it starts, when evaluated\n    per_head = (\"logit\",)",
          "sentinel_l0\": {}}\n    per_head = ()",
          ("test_promises.py::test_every_tensor_with_a_head_axis_is_pruned[sentinel]",)),
    Fault("skipped heads leave others their keys", "attention.py",
          "shared_keys = slice(heads.start // group, -(-heads.stop // group))",
          "shared_keys = slice(0, -(-heads.stop // group) - heads.start // group)",
          ("test_promises.py::test_decoding_that_skips_heads_equals_decoding_that_does_not",)),
    # ---- attention and kernels ----
    Fault("a mask that shows the next token", "attention.py",
          "return keys <= queries", "return keys <= queries + 1",
          ("test_attention.py::test_outputs_statistics_and_gradients_equal_those_of_stored_logits",)),
    Fault("the log-sum-exp's gradient with the other sign", "attention.py",
          "torch.cat((*y, -dlse[..., None]", "torch.cat((*y, dlse[..., None]",
          ("test_attention.py::test_outputs_statistics_and_gradients_equal_those_of_stored_logits",)),
    Fault("an odd head is turned by halves that are none", "kernels.py",
          "if x.size(-1) % 2 == 0:\n        return x.roll(half", "if True:\n        return x.roll(half",
          ("test_kernels.py::test_rope_of_an_odd_size_leaves_the_last_dimension_alone",)),
    Fault("the norm of a CPU forgets its epsilon", "kernels.py",
          "torch.addcmul(x.new_full((1,), eps)", "torch.addcmul(x.new_zeros(1)",
          ("test_kernels.py::test_norms_and_rotations_equal_their_formula",)),
    Fault("padded heads are scaled as wide ones", "attention.py",
          "q, k, v = pad_to_eights(q, k, v)\n    if not torch",
          "q, k, v = pad_to_eights(q, k, v)\n    options['scale'] = q.size(-1) ** -0.5\n    if not torch",
          ("test_attention.py::test_zeros_for_a_gpus_kernel_change_neither_output_nor_gradient",)),
    Fault("groups of heads read keys in turn", "kernels.py",
          "x.repeat_interleave(n_head // x.size(1), 1)", "x.repeat(1, n_head // x.size(1), 1, 1)",
          ("test_mechanisms.py::test_mixtures_equal_the_written_out_formula[multi-query]",
           "test_mechanisms.py::test_mixtures_equal_the_written_out_formula[grouped]")),
    Fault("portions that are computed again draw other dropout", "attention.py",
          "preserve_rng_state=is_random", "preserve_rng_state=False",
          ("test_attention.py::test_portions_are_computed_once_more_with_the_dropout_that_they_had",)),
    # ---- training and scoring ----
    Fault("Muon's step by the other side's length", "nanoheads/optim.py",
          "math.sqrt(max(1.0, rows / cols))", "math.sqrt(max(1.0, cols / rows))",
          ("test_optim.py::test_even_rows_equal_the_written_normuon",)),
    Fault("singular values above 1 have no margin", "nanoheads/optim.py",
          "MARGIN = 1.02", "MARGIN = 1 / 1.004",
          ("test_optim.py::test_a_nearly_rank_one_update_does_not_blow_up",)),
    Fault("a frozen trunk thaws a step late", "train.py",
          "run.step < config.thaw_from)", "run.step <= config.thaw_from)",
          ("test_finetune.py::test_a_frozen_trunk_stays_as_it_is_until_it_thaws",)),
    Fault("a checkpoint's skips are those of the next step", "checkpoint.py",
          'model.at_step(max(0, state.get("step", math.inf) - 1))',
          'model.at_step(max(0, state.get("step", math.inf)))',
          ("test_finetune.py::test_a_run_starts_its_skips_when_it_is_told_to",)),
    Fault("a gate that starts below 1 shrinks its head", "nanoheads/neutral.py",
          "scale_heads(block.attn, 1 / m.gate())", "pass",
          ("test_init_from.py::test_gates_over_a_checkpoint_can_learn",)),
    Fault("bits of tokens called bits of bytes", "scoring.py",
          'bpb=bits(nats, size["bytes"])', "bpb=bits(nats, tokens)",
          ("test_evaluate.py::test_bytes_and_characters_come_from_meta_not_from_the_token_count",)),
    Fault("a run folder means its last checkpoint", "checkpoint.py",
          '("best.pt", "ckpt.pt") if os', '("ckpt.pt", "best.pt") if os',
          ("test_checkpoint.py::test_a_run_folder_means_its_best_checkpoint",)),
    Fault("tensors of other names are passed over", "checkpoint.py",
          "model.load_state_dict(weights, strict=strict)", "model.load_state_dict(weights, strict=False)",
          ("test_checkpoint.py::test_what_does_not_fit_is_named_in_a_line",)),
    Fault("what a file holds may run", "checkpoint.py",
          "map_location=device, weights_only=True)", "map_location=device, weights_only=False)",
          ("test_checkpoint.py::test_what_is_no_checkpoint_is_refused_in_a_line_and_runs_nothing",)),
    Fault("what is off or 0 is not kept of what was asked for", "nanoheads/start.py",
          "if key not in COMMAND_KEYS and (key not in defaults or value != defaults[key])}",
          "if key not in COMMAND_KEYS and value and (key not in defaults or value != defaults[key])}",
          ("test_configurator.py::test_what_is_off_or_0_is_kept_of_what_was_asked_for",)),
    Fault("a mechanism whose helper was edited is the same one", "own_mechanism.py",
          "if self.helpers else file_digest)[:16]", "if False else file_digest)[:16]",
          ("test_own_mechanism.py::test_an_edited_helper_is_another_mechanism",)),
    Fault("moments of any shape are taken", "nanoheads/optim.py",
          "if name not in moments or moments[name].shape != shape:", "if name not in moments:",
          ("test_checkpoint.py::test_a_run_goes_on_only_with_moments_of_its_parameters",)),
    Fault("a run goes on with any data", "nanoheads/start.py",
          "if not new and digests_of(state[\"meta\"]) != digests_of(dataset.meta):", "if False:",
          ("test_start.py::test_a_run_goes_on_only_with_what_it_was_trained_on",)),
    Fault("what was logged behind the last save stays", "nanoheads/log.py",
          'row["step"] <= (evaluation_step if "val_loss" in row else step)])', 'row["step"] >= 0])',
          ("test_log.py::test_a_run_that_goes_on_drops_half_a_row_and_what_came_after_its_last_save",)),
    Fault("a second writer is let in", "nanoheads/files.py",
          "fcntl.LOCK_EX | (0", "fcntl.LOCK_SH | (0",
          ("test_files.py::test_a_second_writer_is_refused_by_the_number_of_the_first",)),
    Fault("what was noted of a text holds for any", "nanoheads/files.py",
          "if state in (GOOD_STATES.get(path), read_note(note)):",
          "if GOOD_STATES.get(path) or read_note(note):",
          ("test_files.py::test_a_text_is_hashed_once_and_again_where_it_was_touched_or_copied",)),
    Fault("a fork's arguments are dropped", "checkpoint.py",
          'if unknown := [f"{key}={value!r}"[:60] for key, value in arguments.items() if key not in flags]:',
          "if unknown := []:",
          ("test_checkpoint.py::test_a_checkpoint_of_a_fork_is_refused_by_what_nanogpt_does_not_have",)),
    Fault("a link that leads nowhere is a missing file", "nanoheads/common.py",
          "if os.path.lexists(path) and not path.is_file():\n        what =", "if False:\n        what =",
          ("test_files.py::test_a_name_that_leads_to_no_file_is_no_missing_file",)),
    Fault("a resumed run has all its patience again", "checkpoint.py",
          'PROGRESS = ("step", "best_val_loss", "evals_since_best",', 'PROGRESS = ("step", "best_val_loss",',
          ("test_train.py::test_a_resumed_run_has_as_much_patience_left",)),
    Fault("a run that is stopped is not saved", "train.py",
          "if stopping or saving:", "if saving:",
          ("test_train.py::test_a_signal_saves_and_leaves_with_one_line",)),
    Fault("what is saved was not looked at before", "train.py",
          "if (logging or saving or acting", "if (logging or acting",
          ("test_train.py::test_a_loss_that_is_not_finite_stops_before_the_update",)),
    Fault("a file is written in the place of the old one", "nanoheads/common.py",
          'part = path.with_name(path.name + ".part")', "part = path",
          ("test_files.py::test_a_file_is_the_old_one_or_the_new_one",)),
    Fault("a window's first tokens are scored twice", "scoring.py",
          "return position + stride - block_size, end, end - position",
          "return position + stride - block_size, end, end - position + 1",
          ("test_evaluate.py::test_windows_score_each_position_once_and_in_order",)),
    Fault("a window without the tokens before its own", "scoring.py",
          "return position + stride - block_size, end, end - position",
          "return position, end, end - position",
          ("test_evaluate.py::test_scores_are_those_of_one_position_at_a_time",)),
    Fault("a shorter context chooses the tokens of a part by itself", "scoring.py",
          "windows_of(dataset, split, T, stride, max_tokens, longest)[rank::world]",
          "windows_of(dataset, split, T, stride, max_tokens)[rank::world]",
          ("test_evaluate.py::test_a_part_of_the_split_is_the_same_tokens_for_all_checkpoints",)),
    Fault("the same dropout in every step", "train.py",
          "seed_step(run.process.kind, model.config.seed, run.step, run.process.rank)",
          "seed_step(run.process.kind, model.config.seed, run.process.rank)",
          ("test_train.py::test_each_step_of_each_rank_has_dropout_of_its_own",)),
    Fault("clipping has no effect", "train.py",
          "config.grad_clip or math.inf)", "math.inf)",
          ("test_train.py::test_a_gradient_is_clipped_before_the_step_and_logged_as_it_was",)),
    Fault("moments are lost where a run is set up again", "nanoheads/optim.py",
          "                optimizer.state[p] = moments[p]", "                pass",
          ("test_optim.py::test_a_run_that_is_set_up_again_takes_the_steps_that_it_would_have_taken",)),
    # ---- samples and curves ----
    Fault("a later sample is one of the next seed's", "sampling.py",
          "np.random.SeedSequence([seed, i])", "np.random.SeedSequence([seed + i])",
          ("test_sample.py::test_the_same_seed_gives_the_same_text_whatever_else_is_asked_for",)),
    Fault("half a character is shown", "sampling.py",
          "on_piece(decoder.decode(spell(tokens[:1])))",
          'on_piece(spell(tokens[:1]).decode("utf-8", "replace"))',
          ("test_sample.py::test_a_character_of_several_tokens_is_shown_whole",)),
    Fault("a loss that is no number counts as 0 in the mean of its neighbours", "curves.py",
          "total / np.maximum(count, 1)", "total / window",
          ("test_plot_curves.py::"
           "test_the_running_mean_is_centred_and_steps_over_nan_and_ratios_are_those_of_evaluations",)),
    Fault("a skipped run gives its colour away", "curves.py",
          "colour = COLOURS[i % len(COLOURS)]", "colour = COLOURS[len(runs) % len(COLOURS)]",
          ("test_plot_curves.py::test_a_comparison_shows_the_losses_of_every_run_in_its_colour",)),
    # ---- configuration ----
    Fault("of two names for one key the first wins", "other_names.py",
          "translated.update(translated_values)", "translated = {**translated_values, **translated}",
          ("test_typed_elsewhere.py::test_of_two_names_for_one_key_the_later_wins",)),
    Fault("a scale wins over what is set by hand", "configurator.py",
          "set_values, defaults = merge(named_values, hand_set)",
          "set_values, defaults = merge(hand_set, named_values)",
          ("test_configurator.py::test_what_is_set_wins_over_scale_and_mechanism",)),
    Fault("a scale's rates also for another recipe", "configurator.py",
          "if key not in of_recipe}", "}",
          ("test_configurator.py::test_a_scale_with_another_recipe_has_that_recipes_rates",)),
    # ---- text ----
    Fault("bytes in the place of characters", "tokenizer.py",
          "count_chars(a) - count_chars(b))", "len(a) - len(b))",
          ("test_tokenizer.py::test_tokens_stand_for_the_bytes_of_a_text_that_they_respell",)),
    Fault("a shard's header is read as tokens", "shards.py",
          'offset = HEADER if shard["format"] == "llm.c" else 0', "offset = 0",
          ("test_batches.py::test_batches_of_shards_are_those_of_one_file",)),
    Fault("half of a surrogate pair is text", "corpus.py",
          're.compile("[\\ud800-\\udfff]")', 're.compile("[\\udc80-\\udcff]")',
          ("test_prepare.py::test_what_is_no_text_in_a_document_is_replaced_and_counted",)),
    Fault("a special token's name in a text is the token", "tokenizer.py",
          "self.pairs.encode_special_tokens = not special", "self.pairs.encode_special_tokens = False",
          ("test_hf.py::test_a_tokenizer_cuts_pads_and_loses_nothing",
           "test_tokenizer.py::test_special_tokens_are_text_unless_they_are_asked_for")),
    Fault("each rank reads the first rank's rows", "batches.py",
          "np.arange(step * self.rows + rank, (step + 1) * self.rows, world)",
          "np.arange(step * self.rows, (step + 1) * self.rows, world)",
          ("test_batches.py::test_each_pass_reads_each_piece_once",)),
    Fault("positions go on in the next document of a row", "batches.py",
          "positions[i, columns] = np.arange(len(piece) - 1)",
          "positions[i, columns] = np.arange(columns.start, columns.stop)",
          ("test_batches.py::test_documents_in_a_row_do_not_meet",)),
    Fault("an old meta.json stands beside a new text", "dataset.py",
          '(self.folder / "meta.json").unlink(missing_ok=True)', "pass",
          ("test_prepare.py::test_a_kill_at_any_moment_leaves_a_whole_folder_or_none",)),
    Fault("a look back one token too far", "nanoheads/tasks.py",
          "y[:, 1 + level:] = x[:, 1:length - level]", "y[:, 1 + level:] = x[:, :length - level - 1]",
          ("test_tasks.py::test_a_solver_computes_the_answers_from_the_row_alone",)),
    Fault("an end of text counts as text", "dataset.py",
          "self.add(split, np.array([self.tok.end]), 0, 0)",
          "self.add_text(split, self.tok.decode([self.tok.end]))",
          ("test_prepare.py::test_the_splits_add_up_to_the_text[hf]",)),
    # ---- heads ----
    Fault("importance of each entry, not of a sequence", "measuring.py",
          "(y * g).sum((1, 3)).abs().mean(0)", "(y * g).abs().sum((1, 3)).mean(0)",
          ("test_heads.py::test_metrics_are_those_of_a_head_at_a_time",)),
    Fault("gates set by hand are not folded into weights", "surgery.py",
          "scale_heads(attn, attn.gate_by_hand)", "pass",
          ("test_controller.py::test_gates_by_hand_go_into_the_projections_of_every_mechanism",)),
    Fault("averages weigh the past as they should the present", "measuring.py",
          "mean = values * (1 - keep) + np.nan_to_num(old_mean) * keep",
          "mean = values * keep + np.nan_to_num(old_mean) * (1 - keep)",
          ("test_controller.py::test_averages_weigh_the_past",)),
    Fault("a new head says something at once", "surgery.py",
          "fresh_attn.c_proj.weight[:, (~is_old).repeat_interleave(attn.head_size)] = 0.0", "pass",
          ("test_controller.py::test_growth_on_a_plateau_preserves_the_logits_and_opens_slowly",
           "test_heads.py::test_inserted_heads_leave_the_logits_alone_and_learn")),
    Fault("heads are grown while the loss still falls", "surgery.py",
          "if self.ramps or not self.is_plateau(measurements.losses):", "if self.ramps:",
          ("test_controller.py::test_no_growth_while_the_loss_falls_or_heads_idle_or_none_is_free",)),
    Fault("a learned state sends no gradient", "model.py",
          "gate = gate + torch.where(self.consent, expected - expected.detach(), 0.0)", "pass",
          ("test_controller.py::test_learned_agency_withdraws_a_head_that_says_nothing",)),
    Fault("a group of heads goes with one of them", "nanoheads/pruning.py",
          "if closed.issuperset(range(i // n * n, i // n * n + n))]",
          "if closed.intersection(range(i // n * n, i // n * n + n))]",
          ("test_promises.py::test_a_group_of_which_a_head_is_open_is_not_packed_away",)),
    # ---- Hugging Face ----
    Fault("an exported tokenizer puts a token before a text", "huggingface.py",
          'if not meta.get("published"):', "if False:",
          ("test_hf.py::test_an_exported_tokenizer_gives_the_ids_of_the_run",)),
    Fault("a published model's text begins as ours do", "tokenizer.py",
          'self.first = (self.encode_prompt("") or [self.separator])[0]', "self.first = self.separator",
          ("test_hf.py::test_a_published_models_text_begins_as_its_tokenizer_says",)),
    Fault("an inserted layer's cache is passed over", "inserted.py",
          "kwargs[name] = cache = LateCache(kwargs[name], x, inserted.constraint is not None)",
          "cache = LateCache(kwargs[name], x, inserted.constraint is not None)",
          ("test_dropin.py::test_a_cache_and_padding_change_nothing[gpt2]",)),
    Fault("an inserted router forgets the tokens in the cache", "inserted.py",
          "before = None if forward_pass.cache is None else forward_pass.cache.inputs()", "before = None",
          ("test_dropin.py::test_a_cache_and_padding_change_nothing[gpt2]",)),
    Fault("in a window positions are counted within it", "inserted.py",
          "positions = (n_keys if mask.dtype == torch.bool else mask.amax(-1)).squeeze(1) - 1",
          "positions = n_keys.squeeze(1) - 1",
          ("test_dropin.py::test_what_is_inserted_computes_what_our_gpt_does[mistral]",)),
    Fault("GPT-Neo's queries are divided as GPT-2's are", "huggingface.py",
          "q = q * math.sqrt(c.hidden_size // c.num_heads)", "pass",
          ("test_hf.py::test_a_folder_read_says_what_the_original_says[gpt_neo]",)),
    Fault("a causal layer's router reads the whole text", "as_printed.py",
          "if router_hint is None and self.causal:", "if False:",
          ("test_as_printed.py::test_constraint_heads_look_ahead_unless_causal",)),
    Fault("padding counts as text in a layer", "layers.py",
          "real.sum(-1, keepdim=True).expand(-1, T)", "torch.full((len(x), T), T)",
          ("test_layers.py::test_padding_is_as_if_it_were_not_there",)),
    Fault("a user's labels count characters as tokens", "labellers.py",
          "chars += len(piece.text)", "chars += piece.stop - piece.start",
          ("test_label.py::test_spans_of_characters_reach_their_tokens[byte]",)),
    # ---- plan, queue, trial, records ----
    Fault("seeds that chose are judged as well", "plan.py",
          "(seed for seed in itertools.count(max(c.seeds) + 1) if seed not in c.screen_seeds)",
          "itertools.count(max(c.seeds) + 1)",
          ("test_plan.py::test_variants_are_judged_with_their_seeds_and_the_plain_gpt_with_more",)),
    Fault("the luckiest rates are taken", "plan.py",
          "best if means[0] - means[best] > error else 0", "best",
          ("test_plan.py::test_the_rates_stay_unless_others_are_better_by_a_standard_error",)),
    Fault("rates at which a run failed are judged by those that did not", "plan.py",
          "if len(by_seed) == n > 0 else math.inf", "if by_seed else math.inf",
          ("test_plan.py::test_rates_at_which_a_run_failed_are_not_taken",)),
    Fault("the plain GPT is not tried at a variant's rates", "plan.py",
          "factors.update(*(by_group[group] for by_group in factors_tried.values() if group in by_group))",
          "factors.update()",
          ("test_plan.py::test_the_search_goes_on_where_the_best_is_the_last_one_tried",)),
    Fault("all runs go to the first GPU", "queue.py",
          "min(slots.gpus, key=busy_gpus.count, default=None)", "next(iter(slots.gpus), None)",
          ("test_queue.py::test_the_next_run_gets_the_gpu_with_the_fewest",)),
    Fault("a result is believed in any run's folder", "trial.py",
          "hash_of([folder.resolve().stem, result])", "hash_of([result])",
          ("test_trial.py::test_a_result_that_was_copied_from_another_run_is_not_believed",)),
    Fault("data that changed and came back is scored", "trial.py",
          'if not config.task and dataset.digests_of(state["meta"]) != data.digests:', "if False:",
          ("test_trial.py::test_data_that_changes_while_a_run_is_trained_gives_no_score[True]",)),
    Fault("a trained model that looks ahead has a score", "trial.py",
          'causality.refuse(model, config, "after training", step=max(0, state["step"] - 1))', '""',
          ("test_trial.py::test_a_look_ahead_that_training_grows_has_no_score",)),
    Fault("a spec's name depends on the order of its keys", "records.py",
          "json.dumps(spec, sort_keys=True)", "json.dumps(spec)",
          ("test_plan.py::test_a_run_follows_from_its_spec_alone",)),
    Fault("a run that failed is not tried again", "queue.py",
          "outcomes = {name: outcome for name, outcome in outcomes.items() if isinstance(outcome, Result)}",
          "outcomes = {name: outcome for name, outcome in outcomes.items() if outcome}",
          ("test_queue.py::test_a_failed_run_is_a_failure_and_the_study_goes_on",)),
    Fault("rates are searched on test", "plan.py",
          'return self.run("tune", model, seed, "val", f"{model.name}, {words}")',
          'return self.run("tune", model, seed, self.config.split, f"{model.name}, {words}")',
          ("test_plan.py::test_rates_are_chosen_on_validation_alone",)),
    Fault("a study scores the last checkpoint", "trial.py",
          "    state = checkpoint.read(folder)\n", '    state = checkpoint.read(folder / "ckpt.pt")\n',
          ("test_trial.py::test_the_checkpoint_of_the_lowest_loss_is_scored",)),
    # ---- studies ----
    Fault("p is not corrected for the number of claims", "stats.py",
          "max_true=len(tested))", "max_true=1)",
          ("test_stats.py::test_holm_is_the_written_procedure",
           "test_golden.py::test_every_figure_follows_from_the_scores_as_it_did")),
    Fault("failed runs withhold nothing", "verdicts.py",
          'withheld = verdict if n_failed and verdict != "undecided" else ""', 'withheld = ""',
          ("test_stats.py::test_a_failed_run_withholds_the_verdict_that_it_might_change",)),
    Fault("p of one tail", "stats.py",
          "float(2 * stdtr(df, -abs(mean) / se))", "float(stdtr(df, -abs(mean) / se))",
          ("test_stats.py::test_a_difference_is_welchs",)),
    Fault("degrees of freedom that trust a spread that is small by chance", "stats.py",
          "df = min(satterthwaite(squares, sizes), satterthwaite(squares_of_equal_spreads, sizes))",
          "df = satterthwaite(squares, sizes)",
          ("test_stats.py::test_a_difference_is_welchs",)),
    Fault("a program is told a verdict of an unfinished study", "report.py",
          'verdict="unfinished", interim_verdict=so_far', "verdict=so_far, interim_verdict=so_far",
          ("test_report.py::"
           "test_a_program_gets_no_verdict_of_an_unfinished_study_nor_one_that_a_failure_may_change",)),
    Fault("verdicts by uncorrected p", "verdicts.py",
          "zip(pairs, differences, stats.holm_correct(differences))",
          "zip(pairs, differences, differences)",
          ("test_golden.py::test_every_figure_follows_from_the_scores_as_it_did",)),
    Fault("the curve's nearer budget has the smaller weight", "verdicts.py",
          "share = math.log(multiple / lower)", "share = math.log(upper / multiple)",
          ("test_golden.py::test_every_figure_follows_from_the_scores_as_it_did",)),
    Fault("one seed that both share makes scores identical", "verdicts.py",
          "len(shared) == min(len(scores), len(other_scores)) > 1",
          "len(shared) == min(len(scores), len(other_scores)) > 0",
          ("test_stats.py::test_one_seed_that_both_sides_share_shows_nothing",)),
    # ---- pages and layout ----
    Fault("a command of a page has a flag that its program lacks", "docs/compare.md",
          "recall-key_offset --levels 8,12,24", "recall-key_offset --lvls 8,12,24",
          ("test_docs.py::test_every_command_of_a_page_is_read[docs/compare.md]",)),
    Fault("a figure of a page is changed by hand", "docs/results/scale.md", "| 2.3995 |", "| 2.4995 |",
          ("test_figures.py::test_the_command_finds_every_table_as_it_is",)),
    Fault("the study imports the lab", "study/digest.py",
          "from nanoheads.extensions import EXTENSIONS\n",
          "from lab.labels import targets\nfrom nanoheads.extensions import EXTENSIONS\n",
          ("test_layout.py::"
           "test_the_core_imports_no_room_beside_it_and_no_room_another_or_a_program[the lab]",)),
    # ---- probes ----
    Fault("a judge's windows do not overlap", "probes/text.py",
          "in windows(len(text), T, max(1, T // 2)):", "in windows(len(text), T, T):",
          ("test_textquality.py::test_the_judge_scores_each_byte_in_its_context[8]",)),
    Fault("a loop without its first round", "probes/quality.py",
          "longest = max(longest, run + period)", "longest = max(longest, run)",
          ("test_textquality.py::test_each_measure_is_the_slow_one",)),
    Fault("thresholds are chosen on what is measured", "constraints/score.py",
          "best_threshold(y_chosen, p_chosen[is_chosen, n])", "best_threshold(y, p[is_measured, n])",
          ("test_constraints.py::test_score_tells_what_is_there_from_what_is_not",)),
    Fault("one token ahead is not looked at", "causality.py",
          "self.changes(ids, place < token)", "self.changes(ids, place < token - 1)",
          ("test_leak.py::test_a_leak_is_found_at_its_place",)),
)


class Missing(Exception):
    """A fault that cannot be planted, or a test that there is not, in one line."""


def files_here():
    """Paths of the files of the repository, those too that are not committed yet."""
    listed = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT,
                            capture_output=True, check=True, text=True).stdout
    return [path for path in listed.split("\0") if path and (ROOT / path).is_file()]


def only(paths, name, of):
    """The one path that ends in a name."""
    found = [path for path in paths if path.startswith("tests/") == of and f"/{path}".endswith(f"/{name}")]
    if len(found) != 1:
        raise Missing(f"{name}: {len(found)} files end in that")
    return found[0]


def place_of(fault, paths):
    """(path, line) of a fault's old text."""
    path = only(paths, fault.file, of=False)
    text = (ROOT / path).read_text(encoding="utf-8")
    if text.count(fault.old) != 1:
        raise Missing(f"{path} has {fault.old!r} {text.count(fault.old)} times, not once")
    return path, text[:text.index(fault.old)].count("\n") + 1


def tests_of(fault, paths):
    """A fault's tests as pytest takes them."""
    names = (test.partition("::") for test in fault.tests)
    return [f"{only(paths, file, of=True)}::{name}" for file, _, name in names]


def summary_of(said):
    """(the first test that fails or "", the last line) of what pytest printed."""
    failed = re.search(r"^FAILED (?:\S*/)?(test_\w+\.py::.+?)(?: - .*)?$", said, re.M)
    return failed[1] if failed else "", (said.strip() or "nothing").splitlines()[-1]


def copy_of(paths, tree):
    """A copy of the repository's files in a folder; the folder."""
    for path in paths:
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / path, tree / path)
    return tree


def start_tests(tree, tests, said):
    """Run tests in a copy until one fails, what they print into a file; the number of the process."""
    sys.stdout.flush()
    if process := os.fork():
        return process
    with open(said, "wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(tree)
    sys.path.insert(0, str(tree))
    sys.dont_write_bytecode = True
    # the copy's files before those of an installation, also in processes that tests start
    os.environ.update(OMP_NUM_THREADS="1", PYTHONPATH=str(tree), PYTHONDONTWRITEBYTECODE="1")
    code = 3  # pytest's own number for what went wrong inside of it
    try:
        code = pytest.main(["-x", "-p", "no:cacheprovider", "--disable-warnings", *tests])
        sys.stdout.flush()
    finally:
        os._exit(code)  # whatever happens, this process does not go on as the one that it is forked from


def run_as_they_are(tree, tests, jobs):
    """End with a line where one of the tests fails though no fault is planted."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tree)}
    command = [sys.executable, "-m", "pytest", "-n", str(jobs), "-x", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True)
    if done.returncode:
        test, last = summary_of(done.stdout or done.stderr)
        sys.exit(f"planted: without any fault, {test or 'pytest'} fails: {last}")


class Place(NamedTuple):
    """Where a fault is planted, and the tests that are to find it."""
    fault: Fault
    path: str
    line: int
    tests: list

    def plant(self, tree):
        """Put the fault into a copy that is whole otherwise."""
        text = (ROOT / self.path).read_text(encoding="utf-8")
        (tree / self.path).write_text(text.replace(self.fault.old, self.fault.new), encoding="utf-8")

    def take_out(self, tree):
        shutil.copy2(ROOT / self.path, tree / self.path)


def verdict(code, said):
    """(whether a test failed, what there is to say) of tests that ended with a code and printed this."""
    test, last = summary_of(said)
    if code == 1 and test:
        return True, test
    return False, "NOT FOUND" if code == 0 else f"NOT RUN: {last}"


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="faults, by their names (default: all)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(),
                        help="so many at a time (default: one a core)")
    parser.add_argument("--list", action="store_true", help="print what they are, and plant none")
    args = parser.parse_args(argv)
    if unknown := set(args.names) - {fault.name for fault in FAULTS}:
        sys.exit(f"planted: there is no fault called {sorted(unknown)[0]!r}; --list names them")
    faults = [fault for fault in FAULTS if not args.names or fault.name in args.names]
    if args.list:
        for fault in faults:
            print(f"{fault.name}\n    {fault.file}: {fault.old}\n    becomes: {fault.new}")
        return
    paths, n_found = files_here(), 0
    width = max(len(fault.name) for fault in faults)

    def say(fault, place, what):
        print(f"{fault.name:{width}}  {place:34}  {what}", flush=True)

    ready = []
    for fault in faults:
        try:
            ready.append(Place(fault, *place_of(fault, paths), tests_of(fault, paths)))
        except Missing as e:
            say(fault, fault.file, f"NOT PLANTED: {e}")
    with tempfile.TemporaryDirectory(prefix="planted_") as folder:
        trees = [copy_of(paths, Path(folder, str(number))) for number in range(args.jobs)]
        if named := dict.fromkeys(test for place in ready for test in place.tests):
            run_as_they_are(trees[0], named, args.jobs)
        running = {}  # number of a process: (the place of the fault that its tests are to find, their copy)
        while ready or running:
            while ready and trees:
                place, tree = ready.pop(0), trees.pop()
                place.plant(tree)
                running[start_tests(tree, place.tests, tree.with_suffix(".said"))] = place, tree
            process, status = os.wait()
            place, tree = running.pop(process)
            place.take_out(tree)
            trees.append(tree)
            said = tree.with_suffix(".said").read_text(errors="replace")
            found, what = verdict(os.waitstatus_to_exitcode(status), said)
            n_found += found
            say(place.fault, f"{place.path}:{place.line}", what)
    print(f"{n_found} of {len(faults)} faults are found")
    if n_found < len(faults):
        sys.exit(1)


if __name__ == "__main__":
    main()
