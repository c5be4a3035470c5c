// The rank process of a job that runs a command (JobSpec.command): `muster-worker command`. It
// agrees with the other ranks where rank 0 listens, runs the command as its child, in its own
// session and process group, and reports what the command says of its progress.
//
//   shim --> muster-worker command (rank process) --> the command
//
// Signals to the group reach the command directly; this process waits for it, and then ends in the
// same way, so that what the shim sees is the end of the command. If this process is killed, so is
// the command (PR_SET_PDEATHSIG).
#ifndef MUSTER_WORKER_COMMAND_COMMAND_RANK_H_
#define MUSTER_WORKER_COMMAND_COMMAND_RANK_H_

#include <string>

namespace muster::worker {

// Exit statuses of its own, as shells give them. exit.pb has the cause.
constexpr int kExitCannotRun = 126;
constexpr int kExitNoProgram = 127;

// Carries out the v1::RankAssignment in the file `assignment`. Returns the exit status; does not
// return when a signal ended the command.
int RunCommandRank(const std::string& assignment);

}  // namespace muster::worker

#endif  // MUSTER_WORKER_COMMAND_COMMAND_RANK_H_
