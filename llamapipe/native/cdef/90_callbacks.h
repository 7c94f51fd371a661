// Entries of Python that native code calls. Not for the C++ compiler: cffi generates their code.

// Called while a model loads, on the loading thread; returning false stops the load.
extern "Python" bool lp_on_progress(float progress, void * user_data);
