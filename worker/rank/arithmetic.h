// What share of its devices' peak FLOP/s a run uses (MFU as in PaLM, arXiv 2204.02311, appendix B).
#ifndef MUSTER_WORKER_RANK_ARITHMETIC_H_
#define MUSTER_WORKER_RANK_ARITHMETIC_H_

#include <string>

#include "parallel/model/model.h"
#include "parallel/train/trainer.h"

namespace muster::worker {

// A value. FLOPs are those of Model::FlopsPerToken.
struct Arithmetic {
  double model_flops = 0;     // per token
  double hardware_flops = 0;  // per token, recomputation counted again
  double peak_flops = 0;      // per second of one rank's device; 0: not known
  int ranks = 1;
  std::string unknown_device;  // a GPU without a peak; else empty

  // `device` is the name of every rank's device.
  static Arithmetic Of(const parallel::Model& model, const std::string& device,
                       parallel::Precision precision, bool tf32, int ranks);

  // The share of the peak, 0 to 1; 0 where the peak is not known or no time has passed.
  double Utilization(double flops_per_token, double tokens, double seconds) const;
  // The formula with its numbers, for people.
  std::string ToText() const;
};

}  // namespace muster::worker

#endif  // MUSTER_WORKER_RANK_ARITHMETIC_H_
