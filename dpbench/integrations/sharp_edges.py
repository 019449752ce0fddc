"""What people step on who train with differential privacy: what it does to the guarantee, what is said, what holds it.

**Breaks the guarantee.** Without a word an ε would be printed that does not hold.

| what people do | what happens here | held by |
|---|---|---|
| batches of a shuffled loader, accounted as Poisson samples | a warning: "not Poisson samples, as is accounted"; `data_loader` draws them | `test_fixed_batches_are_not_taken_for_poisson_samples` |
| a model that mixes samples: BatchNorm, `x - x.mean(0)` | refused: "samples mix" | `test_a_model_that_mixes_samples_is_refused` |
| a loss that mixes them: InfoNCE, losses over their mean, the largest dropped | refused: "samples mix" | `test_a_loss_that_mixes_samples_is_refused` |
| a loss divided by the tokens or the classes of the batch, through Trainer or Lightning | refused: "samples mix", "to be its own" | `test_a_loss_over_the_tokens_of_the_batch_is_refused` |
| the same where `make_private` hands out the batches | refused: "samples mix" | `test_losses_that_mix_samples_are_refused` |
| padding to the longest record, seen by the model (no mask, positions after it) | Trainer: "expected the loss of record ... to be its own" | `test_padding_on_the_left_moves_positions_and_is_refused` |
| mixup, in `collate_fn` or on the device | refused: "to be its own", "what the model reads for sample" | `test_hooks_of_a_batch_on_its_way_see_the_pieces` |
| a sampler of one's own, batches by length, `drop_last` | refused by name | `test_what_cannot_be_private_is_refused_by_name` |
| a stream of records, or a search by Trainer, each trial on the same records | refused by name | `test_methods_of_ones_own_and_streams_are_refused` |
| Opacus' `poisson_sampling=False` | accounted as passes over fixed batches, at a larger ε | `test_batches_that_are_not_sampled_are_accounted_as_what_they_are` |
| many records of one person | ε is that of a record; make all of a person one | `test_a_user_is_clipped_as_one_record` |
| a loss or a model that divides by the number of records, in `make_step`; a model, in any loop | refused: "samples mix" | `test_a_model_that_mixes_is_refused` |
| labels that are counted to weigh classes, in `make_step` | refused: "samples mix" | `test_a_loss_that_mixes_is_refused` |
| a mean over the positions of the longest record of a batch | refused: "samples mix" | `test_a_mean_over_the_positions_of_the_longest_record_is_refused` |
| a discriminator that is frozen in the generator's step | trained with its own gradient afterwards | `test_a_discriminator_that_is_frozen_while_the_generator_is_trained` |
| a copy or a pickle of an engine | draws noise and batches of its own | `test_a_copy_draws_noise_and_batches_of_its_own` |
| mixing that begins in a later step | refused then, by looks at random steps | `test_mixing_that_starts_in_the_second_step_is_refused` |
| another optimizer's step on a private model | "expected steps of the attached optimizer alone" | `test_another_optimizer_does_not_go_round_the_engine` |
| gradients in `.grad` that were not clipped | "were not clipped, and are not used" | `test_step_without_a_loss_or_with_a_closure` |
| a frozen parameter with a gradient left on it | it is not applied | `test_a_gradient_left_on_a_frozen_parameter_is_not_applied` |
| the same record in two pieces of a logical batch | `data_loader` knows which are pieces; by hand it is refused | `test_what_the_loader_hands_out_is_not_accumulated_by_hand` |
| a loader that reads ahead of the step | each batch is known by its tensors; an unknown one is refused | `test_what_is_not_known_is_refused_by_name` |
| a buffer that the next batch is copied into before the step | autograd's error: "modified by an inplace operation" | `test_what_is_changed_in_place_before_the_step_is_noticed_as_autograd_does` |
| a step that raises, is caught, and is tried again | nothing is in a sum twice, nothing is released twice | `test_a_batch_of_which_something_was_released_is_not_released_again` |
| going on from a checkpoint without the engine's state | refused: ε would begin anew | `test_training_resumed_without_the_engine_s_state_is_refused` |
| going back to a checkpoint | the steps gone back behind count, too | `test_to_go_back_does_not_lower_epsilon` |
| one checkpoint for all processes | each draws noise of its own; another's part is refused | `test_half_a_logical_batch_of_another_process_is_refused` |
| one process catches an error, the others go on | all raise, and nothing is released | `test_a_failure_in_one_process_is_one_in_all_and_no_record_is_in_a_sum_twice` |
| a clipping function that exceeds its sensitivity | refused | `test_a_clipping_function_that_does_not_keep_to_its_sensitivity_is_refused` |
| noise from a seed | a warning: "can be repeated: not private" | `test_seeded_noise_is_not_private` |
| δ of 1/n and more | a warning: it protects nobody | `test_a_delta_that_protects_nobody` |
| more steps than the noise was calibrated for | a warning that names the step | `test_beyond_the_planned_steps` |
| two engines on one model | refused: neither would account for the other's steps | `test_two_engines_on_one_model` |
| one record that cancels in floating point | its norm is bounded by what rounding can hide | `test_no_hard_record_moves_the_sum_of_ours_by_more_than_c` |

**Loses utility, or time.** The guarantee holds.

| what people do | what happens here | held by |
|---|---|---|
| dividing by the size that was sampled | the expected size divides, always; the sampled one is private | `test_empty_batches_move_the_parameters_and_count` |
| a GradScaler, for half precision | refused: every gradient would be above the threshold | `test_a_grad_scaler_is_refused` |
| a sum over the batch, said to be a mean, or the other way round | refused: "the loss is a sum over the batch" | `test_a_sum_is_no_mean_and_a_mean_no_sum` |
| `max_grad_norm=0`, which is no clipping to Trainer | refused: nothing would be learned | `test_lengths_norms_and_privacy_that_do_not_fit_are_refused` |
| LBFGS, or a closure | refused: one gradient a step | `test_an_optimizer_of_several_gradients_a_step_is_refused` |
| a fused optimizer on weights in `channels_last`, which goes by memory | gradients lie as autograd lays them | `test_fused_optimizers_pair_the_right_entries` |
| torch.compile of the model, or of a function that calls it | refused; `make_step(loss_fn, compile=True)` compiles the step | `test_what_is_compiled_after_the_engine_is_refused_or_exact` |
| numbers, modules, buffers and hooks that change after a compiled step was traced | the step is captured anew | `test_what_changes_in_python_changes_the_compiled_step` |
| compiled steps of batches that are all of different sizes | a warning: "pad batches to few shapes" | `test_more_shapes_than_there_are_graphs_for` |
| Adam, whose second moment is then mostly noise | trained as it is; `AdamBC` takes the noise's part off | `test_its_second_moment_is_that_of_gradients_without_noise` |
| one loss for the whole batch | refused: "one loss a sample" | `test_scalar_loss` |
| a record that is not a number | named by its position; the step is not taken | `test_a_record_that_is_not_a_number_is_named_and_the_model_is_not_blamed` |
| buffers that learn from the data (running statistics) | told: they are not accounted | `test_a_buffer_that_learns_from_the_data_is_told` |
| an empty batch | a step like any other: noise alone | `test_empty_batches_move_the_parameters_and_count` |

**Yours to see to.** In a loop of your own, and in accelerate's, the engine sees the model and what is made of its outputs:
not losses that are divided by their number, or by what the batch's labels add up to, nor what a batch was made of. Opacus' loops are not looked
at for padding, which recurrent models see where the last position is read.

**Nobody's to see.** Choosing hyperparameters by the private data, early stopping by their loss, publishing their training
accuracy, the order of records in logs: none of it passes the engine, and none of it is in ε.
"""
