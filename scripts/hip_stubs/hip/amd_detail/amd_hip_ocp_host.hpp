// For the compile check without ROCm only: MORI includes this file and takes no name from it that the stubs beside lack.
#pragma once
