"""Common mistakes in private training: what they do to the guarantee, how dpbench answers, and the test of that.

**Breaks the guarantee.** Without a check, the printed ε would not hold.

| mistake | result | test |
|---|---|---|
| batches of a shuffled loader, accounted as Poisson samples | a warning: "not Poisson samples, as is accounted"; `data_loader` draws them | `test_fixed_batches_are_not_taken_for_poisson_samples` |
| a model that mixes samples: BatchNorm, `x - x.mean(0)` | refused: "samples mix" | `test_a_model_that_mixes_samples_is_refused` |
| a loss that mixes them: InfoNCE, division by their mean, dropping the largest | refused: "samples mix" | `test_a_loss_that_mixes_samples_is_refused` |
| a loss divided by the tokens or the classes of the batch, weighted by its labels, or broadcast to [B, B] | refused: "samples mix", "to be its own" | `test_losses_that_depend_on_the_labels_of_others_are_refused` |
| the same with batches from `make_private` | refused: "samples mix" | `test_losses_that_mix_samples_are_refused` |
| mixup, or normalisation by the batch, between `data_loader` and the model | refused: "what the model reads for sample" | `test_inputs_that_are_mixed_before_the_model_are_refused` |
| padding to the longest record, seen by the model (no mask, positions after it) | Trainer, Lightning: "expected the loss of record ... to be its own" | `test_padding_on_the_left_moves_positions_and_is_refused` |
| mixup, or statistics of a batch, in `collate_fn` | refused: "to be its own" | `test_a_collator_that_mixes_records_is_refused` |
| the same on the device, in Lightning's hooks | refused: "what the model reads for sample" | `test_hooks_of_a_batch_on_its_way_see_the_pieces` |
| your own sampler, batches by length, `drop_last` | refused by name | `test_what_cannot_be_private_is_refused_by_name` |
| a stream of records, or Trainer's hyperparameter search on the same records | refused by name | `test_what_cannot_be_private_is_refused_by_name` |
| Opacus' `poisson_sampling=False` | accounted as fixed batches, at a larger ε | `test_batches_that_are_not_sampled_are_accounted_as_what_they_are` |
| many records of one person | ε protects one record; set `group_size`, or combine a person's records into one | `test_a_user_is_clipped_as_one_record` |
| a loss in `make_step`, or a model in any loop, that divides by the number of records | refused: "samples mix" | `test_a_model_that_mixes_is_refused` |
| class weights from label counts, in `make_step` | refused: "samples mix" | `test_a_loss_that_mixes_is_refused` |
| a mean over the positions of the longest record of a batch | refused: "samples mix" | `test_a_mean_over_the_positions_of_the_longest_record_is_refused` |
| a discriminator frozen in the generator's step | later trained with its own gradient | `test_a_discriminator_that_is_frozen_while_the_generator_is_trained` |
| a copy or a pickle of an engine | draws its own noise and batches | `test_a_copy_draws_noise_and_batches_of_its_own` |
| a model that keeps a part of its records in a buffer or frozen parameter, or for a later step | refused: "neither clipped nor noised" | `test_a_model_that_keeps_a_part_of_its_records_is_refused` |
| mixing that begins in a later step | refused then, by checks of random steps | `test_mixing_that_starts_in_the_second_step_is_refused` |
| another optimizer's step on a private model | "expected steps of the attached optimizer alone" | `test_another_optimizer_does_not_go_round_the_engine` |
| unclipped gradients in `.grad` | "were not clipped, and are not used" | `test_what_are_no_losses_of_the_batch` |
| a frozen parameter with an old gradient | not applied | `test_a_gradient_left_on_a_frozen_parameter_is_not_applied` |
| a loss over a running mean of earlier batches, or beside a queue of their outputs | refused: "samples mix", "of this batch or an earlier one" | `test_losses_that_depend_on_an_earlier_batch_are_refused` |
| losses or inputs divided by the number of the batch's samples (`losses / len(y)`) | refused: "samples mix", in the second checked batch of another size | `test_losses_that_are_scaled_by_the_number_of_samples_are_refused` |
| the same record in two pieces of a logical batch | `data_loader` keeps pieces apart; by hand it is refused | `test_what_the_loader_hands_out_is_not_accumulated_by_hand` |
| the same tensors in two parts by hand, as one head's loss after the other's | refused: "other records in each part" | `test_a_record_in_two_parts_of_a_logical_batch_is_refused` |
| batches kept and used again (`list`, `itertools.cycle`) | refused; a warning after 64 others | `test_batches_that_are_kept_and_used_again_are_refused_or_told` |
| `nn.Embedding(max_norm=...)`, which scales the rows of a batch's words | refused by name | `test_an_embedding_that_scales_the_rows_of_a_batch_is_refused` |
| a hook on a parameter's gradient | the next step is verified, and refused if the hook changes it | `test_a_hook_of_a_parameter_that_comes_later_is_verified_anew_or_refused` |
| a loader that reads ahead of the step | batches are recognised by their tensors; an unknown one is refused | `test_what_is_not_known_is_refused_by_name` |
| a buffer overwritten by the next batch before the step | autograd's error: "modified by an inplace operation" | `test_what_is_changed_in_place_before_the_step_is_noticed_as_autograd_does` |
| retrying a step that raised | nothing is summed or released twice | `test_a_batch_of_which_something_was_released_is_not_released_again` |
| resuming from a checkpoint without the engine's state | refused: ε would restart | `test_training_resumed_without_the_engine_s_state_is_refused` |
| returning to an earlier checkpoint | the undone steps still count | `test_to_go_back_does_not_lower_epsilon` |
| one checkpoint for all processes | each draws its own noise; another's part is refused | `test_half_a_logical_batch_of_another_process_is_refused` |
| an error caught in one process only | all raise, and nothing is released | `test_a_failure_in_one_process_is_one_in_all_and_no_record_is_in_a_sum_twice` |
| a clipping function that exceeds its sensitivity | refused | `test_a_clipping_function_that_does_not_keep_to_its_sensitivity_is_refused` |
| a clipping norm that changes within a logical batch | refused: "one sensitivity" | `test_a_clipping_norm_that_changes_within_a_logical_batch_is_refused` |
| noise from a seed | a warning: "can be repeated: not private" | `test_seeded_noise_is_not_private` |
| δ of 1/n or more | a warning: publishing a random record would be as private | `test_a_delta_that_protects_nobody` |
| more steps than the noise was calibrated for | a warning that names the step | `test_beyond_the_planned_steps` |
| two engines on one model | refused: neither would account for the other's steps | `test_two_engines_on_one_model` |
| one record that cancels in floating point | its norm is bounded by what rounding can hide | `test_no_hard_record_moves_the_sum_of_ours_by_more_than_c` |

**Loses utility, or time.** The guarantee holds.

| mistake | result | test |
|---|---|---|
| dividing by the sampled batch size | the expected size always divides; the sampled one is private | `test_empty_batches_move_the_parameters_and_count` |
| a GradScaler, for half precision | refused: every gradient would be above the threshold | `test_a_grad_scaler_is_refused` |
| a gradient put into `.grad` before the step, by a penalty's `backward()` or a hook of Lightning or Trainer | refused: "would be lost"; a pre-hook of `optimizer.step` may add to the noisy gradient | `test_a_gradient_beside_the_losses_would_be_lost_and_is_refused` |
| a piece of a logical batch without a step, as by `if accelerator.sync_gradients:` | a warning: "not in the sum" | `test_a_piece_that_is_left_out_of_its_logical_batch_is_said` |
| a sum over the batch declared as a mean, or a mean as a sum | refused: "the loss is a sum over the batch" | `test_a_sum_is_no_mean_and_a_mean_no_sum` |
| `max_grad_norm=0`, Trainer's way to turn clipping off | refused: nothing would be learned | `test_what_cannot_be_private_is_refused_by_name` |
| LBFGS, SAM, or a closure | refused: a step has one gradient | `test_an_optimizer_of_several_gradients_a_step_is_refused` |
| a fused optimizer on `channels_last` weights, which reads by memory position | gradients have autograd's memory layout | `test_fused_optimizers_pair_the_right_entries` |
| torch.compile of the model, or of a function that calls it | refused; `make_step(loss_fn, compile=True)` compiles the step | `test_what_is_compiled_after_the_engine_is_refused_or_exact` |
| numbers, modules, buffers and hooks that change after a compiled step was traced | the step is captured again | `test_what_changes_in_python_changes_the_compiled_step` |
| compiled steps on batches of many sizes | a warning: "pad batches to few shapes" | `test_more_shapes_than_there_are_graphs_for` |
| Adam, whose second moment is mostly noise | not changed; `AdamBC` subtracts the noise's part | `test_it_is_the_paper_s_algorithm` |
| one loss for the whole batch | refused: "one loss a sample" | `test_what_are_no_losses_of_the_batch` |
| a record with NaN | named by its position; the step is not taken | `test_a_record_that_is_not_a_number_is_named_and_the_model_is_not_blamed` |
| an empty batch | an ordinary step, of noise alone | `test_empty_batches_move_the_parameters_and_count` |

**Not detected in your own loop**, or in accelerate's, and refused by `make_step`: weights or scales that are computed
outside of torch (`losses.tolist()`, NumPy); statistics of activations that the loss takes from a hook or an attribute of
the model, in place of its outputs; numbers of an earlier step. The engine sees the batches of `data_loader`, the model's
arguments, and torch's operations on them and on its outputs. It follows no batch in which tensors differ in length, and
none whose results before the model take 32 times its memory. So it does not detect records that mix in batches of your
own, or data that reach the model through an attribute. Opacus' loops are not checked for padding, which a recurrent
model sees if the loss reads its last position.

**Not detected in any loop:** a tensor of a step that the loop updates after `optimizer.step`, and a later loss reads.

**Never detected.** Hyperparameters chosen by the private data, early stopping by their loss, published training accuracy,
the order of records in logs: none of it passes the engine, and none of it is in ε.
"""
