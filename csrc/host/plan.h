// How a call goes about its sequences, and the workspace that this takes.
#pragma once

#include <cstddef>

namespace flash_kda {

struct Plan {
    // Of each sequence; and first of all, on trial, if there are more than one.
    int segments = 1, trial_segments = 1;
    // Only with more than one.
    int segment_tokens = 0, trial_tokens = 0;
    // Whole items may be cut where their states are forgotten (forget.cuh).
    bool may_forget = false;
    // Bytes. With segments: boundary states, as much for transitions, then what the trial leaves. Else the states that change hands between blocks, and
    // flags; 0 if no item will be cut (schedule.cuh).
    std::size_t workspace_bytes = 0;
};

// For N sequences of at most T tokens and H heads. Depends on nothing but its arguments and FLASH_KDA_SPLIT (0: never cut; auto or unset), so that a
// call can be captured and replayed. `whole`: without segments, and without forgetting. With offsets of several sequences there are no segments
// either: their lengths are known on the device alone. Throws std::runtime_error for another value of FLASH_KDA_SPLIT.
Plan plan_call(int sm_count, int T, int H, int N, bool has_offsets, bool whole);

// Parts of a workspace, in bytes from its start. Without segments: where the flags begin.
std::size_t handoff_flags_offset(int sm_count);
// With segments: where transitions begin, the final states of the trial, and its flags.
std::size_t transitions_offset(const Plan& plan, int H, int N);
std::size_t trial_states_offset(const Plan& plan, int H, int N);
std::size_t trial_flags_offset(const Plan& plan, int H, int N);

}  // namespace flash_kda
