// Names that a worker daemon, its rank processes and `muster local` agree on: the files in a rank's
// run directory (RUN_DIR) and the variable that names it.
#ifndef MUSTER_PROTO_RUN_FILES_H_
#define MUSTER_PROTO_RUN_FILES_H_

namespace muster {

// Set to RUN_DIR in the environment of a rank process and of all its children.
inline constexpr char kRunDirectoryVariable[] = "MUSTER_RUN_DIRECTORY";

}  // namespace muster

#endif  // MUSTER_PROTO_RUN_FILES_H_
