// The host implementations of ssm.h, which has their contracts. The arguments have been checked.
#ifndef MUSTER_KERNELS_SSM_SSM_CPU_H_
#define MUSTER_KERNELS_SSM_SSM_CPU_H_

#include "kernels/ssm/ssm.h"

namespace muster::kernels::cpu {

void CausalConvForward(Stream& stream, const CausalConvArgs& args);
void CausalConvBackward(Stream& stream, const CausalConvBackwardArgs& args);
void SsdForward(Stream& stream, const SsdArgs& args);
void SsdBackward(Stream& stream, const SsdBackwardArgs& args);
void GatedRmsNormForward(Stream& stream, const GatedRmsNormArgs& args);
void GatedRmsNormBackward(Stream& stream, const GatedRmsNormBackwardArgs& args);

}  // namespace muster::kernels::cpu

#endif  // MUSTER_KERNELS_SSM_SSM_CPU_H_
