"""Training: credit assignment, losses, algorithms, the learner and the trainer, under one name.

`run` and plug-ins import it; it never imports `batch_gen` (the table below only names it, so that one import serves a loop).
Nothing is imported until it is asked for, so `ludic.training.MonteCarloReturn` loads no torch. Start with trainer.py, then
algorithms/presets.py (what GRPO is), credit_assignment/group.py (its advantage), losses/, learner/ (the update).
algorithm.py and loss.py are older import paths of algorithms/ and losses/.
"""

import importlib
from typing import Any

_NAMES_BY_MODULE = {
    "ludic.types": "EnvSpec ProtocolSpec CtxSpec RolloutRequest SAWItem SAWBatch SampleAttachments ActorTokenLogps Rollout "
    "Reducer default_reducers apply_reducers_to_records",
    "ludic.training.learner.packing": "split_items_by_token_budget collate_saw_items collate_micro_batches MicroBatch",
    "ludic.batch_gen": "RolloutEngine RolloutBatchSource AsyncRolloutBatchSource OfflineBatchSource MixedBatchSource MixedPart "
    "ReplayBatchSource TeacherAnnotatedBatchSource DomainTeachers PrivilegedTeacher hint_first GRPORequestStrategy "
    "IdentityStrategy RequestsExhausted make_requests_fn_from_queue make_dataset_queue_requests_fn "
    "make_dataset_sequence_requests_fn make_chat_template_step_to_item PreferenceBatchSource",
    "ludic.training.credit_assignment": "MonteCarloReturn GroupNormalizedReturn HybridNormalizedReturn EpisodicReturn "
    "PerStepReward ConstantCredit TurnGroupReturn LeaveOneOutReturn TrackedValueReturn BetaValueTracker GAE gae "
    "TurnLeaveOneOutReturn StateGroupReturn RoleBaselineReturn Relabelled with_turn_rewards PotentialShaping info_potential "
    "MaximumLikelihoodReturn ProposerSolverReturn learnability FoldedReturn fold_penalties KLCreditModifier "
    "ScaledCredit EpisodeCredit",
    "ludic.training.filters": "keep_all drop_truncated drop_incomplete_completions drop_parse_errors keep_env_steps "
    "keep_agent_steps combine any_of apply_filter default_step_selector PreprocessFn compose_preprocess "
    "validate_actor_logps forget_temperature drop_zero_weight_samples "
    "filter_zero_variance_groups",
    "ludic.training.losses": "ReinforceLoss ReinforceBaselineLoss ClippedSurrogateLoss TokenClippedSurrogateLoss "
    "CISPOLoss SAPOLoss GMPOLoss MaskedCausalLMCrossEntropyLoss KLLoss TokenKLLoss EntropyBonus LossTerm CompositeLoss RoutedLoss "
    "ObservationLoss DistillationLoss Needs",
    "ludic.training.algorithms": "RLAlgorithm with_episode_credit make_grpo make_dr_grpo make_dapo make_gspo make_cispo "
    "make_sapo make_gmpo make_rloo make_reinforce make_reinforce_baseline make_reinforce_pp make_ppo make_scalerl make_sft "
    "make_rft make_dpo make_ipo make_kto mix_objectives Objective make_spo "
    "make_proposer_solver make_fold_grpo make_maxrl make_echo make_gdpo make_opd make_grpo_opd make_mopd make_gigpo",
    "ludic.training.critic.gae": "TokenGAE TurnGAE",
    "ludic.training.trainer": "Trainer TrainingLoop",
    "ludic.training.learner.interface": "Learner",
    "ludic.training.multi_policy": "train_policies common_step",
    "ludic_tinker.learner": "TinkerTrainer",
    "ludic.training.config": "TrainerConfig",
    "ludic.training.checkpoint.manager": "CheckpointConfig CheckpointManager",
    "ludic.training.loggers": "PrintLogger RichLiveLogger TeeLogger WandbLogger JSONLLogger TensorBoardLogger TrackioLogger",
}
_MODULE_OF = {name: module for module, names in _NAMES_BY_MODULE.items() for name in names.split()}

__all__ = list(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(_MODULE_OF[name]), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF})
